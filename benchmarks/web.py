"""Milliseconds of ONNX files in onnxruntime-web, wasm on one thread, in a real headless Chromium: medians, in turn.

    python benchmarks/web.py float32.onnx before.onnx after.onnx

Files of `maskaq export`; the first is the measure. Needs selenium, chromium, chromedriver and npm.
"""

import functools
import json
import shutil
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from selenium import webdriver

from maskaq.artifact.export.onnx import metadata_of

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "web"))
import prepare

PAGE = """<!doctype html><script type="module">
import * as ort from "./vendor/ort.wasm.bundle.min.mjs";
ort.env.wasm.numThreads = 1;
window.bench = async (files, shape, repeats) => {
  const sessions = [];
  for (const file of files) {
    const bytes = await (await fetch(file)).arrayBuffer();
    sessions.push(await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] }));
  }
  const values = new Float32Array(shape.reduce((a, b) => a * b, 1)).map(() => 2 * Math.random() - 1);
  const images = new ort.Tensor("float32", values, shape);
  const taken = files.map(() => []);
  for (let repeat = -1; repeat < repeats; repeat++)
    for (const [i, session] of sessions.entries()) {
      const began = performance.now();
      await session.run({ images });
      if (repeat >= 0) taken[i].push(performance.now() - began);
    }
  return taken;
};
window.ready = true;
</script>"""


CALL = """
const [files, shape, repeats, done] = arguments;
const failed = (error) => done(String(error));
const call = () => window.ready ? bench(files, shape, repeats).then(done, failed) : setTimeout(call, 50);
call();
"""


def main(files: list[str], repeats: int = 15) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "index.html").write_text(PAGE)
        prepare.fetch_runtime(folder)
        for i, file in enumerate(files):
            shutil.copy(file, folder / f"{i}.onnx")
        handler = functools.partial(_Quiet, directory=name)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = webdriver.ChromeOptions()
        for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
            options.add_argument(word)
        browser = webdriver.Chrome(options=options)
        try:
            browser.set_script_timeout(600)
            browser.get(f"http://127.0.0.1:{server.server_port}/")
            size = metadata_of(files[0])["input_size"]
            names = [f"{i}.onnx" for i in range(len(files))]
            taken = browser.execute_async_script(CALL, names, [1, *size], repeats)
            if isinstance(taken, str):
                sys.exit(f"onnxruntime-web: {taken}")
            version = browser.capabilities["browserVersion"]
        finally:
            browser.quit()
            server.shutdown()
    print(f"{prepare.PACKAGE}, Chromium {version}, one thread, {repeats} repeats")
    measure = sorted(taken[0])[repeats // 2]
    for file, times in zip(files, taken, strict=True):
        times = sorted(times)
        middle = times[repeats // 2]
        print(f"{file}: {middle:.1f} ms ({times[0]:.1f} - {times[-1]:.1f}), x {measure / middle:.2f}")
    print(json.dumps(dict(zip(files, taken, strict=True))))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
