"""examples/web in a real browser: its answers are those of onnxruntime in Python, also once its server is gone."""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

WEB = Path(__file__).parents[1] / "examples" / "web"
PAGE = ("index.html", "app.js", "style.css", "sw.js")
RUNTIME_FOLDER = "MASKAQ_ONNXRUNTIME_WEB"  # dist/ of an installed onnxruntime-web, in place of npm
SMALL = (
    "synthesis.images=4 synthesis.batch=4 synthesis.steps=2 calibration.epochs=1 calibration.batch=4 refresh.every=0"
)
SECONDS = 60

for extra in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(extra, reason=f'{extra} is missing: pip install "maskaq[onnx]"')
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is missing: pip install selenium")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
if not CHROMIUM or not DRIVER:
    pytest.skip("chromium or chromedriver is missing", allow_module_level=True)
if not shutil.which("npm") and not os.environ.get(RUNTIME_FOLDER):
    pytest.skip(f"npm is missing, and {RUNTIME_FOLDER} is not set", allow_module_level=True)

import onnxruntime  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

from maskaq.cli import main as cli  # noqa: E402

pytestmark = pytest.mark.slow

_spec = importlib.util.spec_from_file_location("prepare", WEB / "prepare.py")
prepare = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(prepare)


def fetch_runtime(folder, config):
    """onnxruntime-web into the folder: from the one that was named, or from npm, once for all runs of the tests."""
    given = os.environ.get(RUNTIME_FOLDER)
    if given:
        shutil.copytree(given, folder / "vendor", ignore=lambda _, names: set(names) - set(prepare.RUNTIME))
        return
    kept = config.cache.mkdir("onnxruntime-web")
    try:
        prepare.fetch_runtime(kept)
    except subprocess.SubprocessError as error:
        pytest.skip(f"npm could not fetch {prepare.PACKAGE}: {getattr(error, 'stderr', None) or error}")
    shutil.copytree(kept / "vendor", folder / "vendor")


@pytest.fixture(scope="module")
def site(tmp_path_factory, request):
    """The page's folder, as `make web` leaves it, but for the budget of the run."""
    root = tmp_path_factory.mktemp("web")
    folder, run = root / "page", root / "run"
    folder.mkdir()
    fetch_runtime(folder, request.config)
    for name in PAGE:
        shutil.copy(WEB / name, folder)
    quantize = f"quantize cifar10_vit --bits w4a4 --recipe demo --device cpu --set {SMALL} --out".split()
    assert cli.main([*quantize, str(run)]) == 0
    assert cli.main(["export", str(run), "--format", "onnx", "-o", str(folder / "model.onnx")]) == 0
    prepare.write_facts(folder)
    prepare.write_examples(folder)
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Server:
    """`python -m http.server`, in a thread."""

    def __init__(self, folder):
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}/"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def stop(self):
        if self.http:
            self.http.shutdown()
            self.http.server_close()
        self.http = None


@pytest.fixture
def server(site):
    running = Server(site)
    yield running
    running.stop()


class Browser:
    def __init__(self, profile):
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={profile}"):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))

    def open(self, address):
        self.driver.get(address)

    def wait(self, ask):
        return WebDriverWait(self.driver, SECONDS, 0.05).until(lambda _: ask())

    def find(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self.find(selector)[0].text

    def answer(self, name):
        """Classes and probabilities that are shown for an image, once they are."""
        self.wait(lambda: self.text("#time").endswith(f" ms · {name}") or self.text("#error"))
        assert not self.text("#error")
        rows = (row.text.removesuffix(" %").rsplit(maxsplit=1) for row in self.find("#result li"))
        return {label: float(percent) / 100 for label, percent in rows}

    def click_example(self, label):
        self.wait(lambda: self.find("#examples img") or self.text("#error"))
        assert not self.text("#error")
        self.find(f"#examples button:has(img[src='examples/{label}.png'])")[0].click()
        return self.answer(f"example: {label}")

    def choose(self, file):
        self.wait(lambda: self.find("#file:enabled"))
        self.find("#file")[0].send_keys(str(file))

    def complaints(self):
        return [entry for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture
def browser(tmp_path):
    opened = Browser(tmp_path / "profile")
    yield opened
    opened.driver.quit()


def python_answer(site, file):
    """All classes and probabilities from onnxruntime, for an image that has the model's size."""
    facts = json.loads((site / "model.json").read_text())
    mean, std = (np.array(facts[key], np.float32) for key in ("mean", "std"))
    pixels = np.asarray(Image.open(file).convert("RGB"), np.float32) / 255
    images = ((pixels - mean) / std).transpose(2, 0, 1)[None]
    (logits,) = onnxruntime.InferenceSession(site / "model.onnx").run(["logits"], {"images": images})
    powers = np.exp(logits[0] - logits.max())
    return dict(zip(facts["classes"], powers / powers.sum(), strict=True))


@pytest.fixture(scope="module")
def expected(site):
    """Python's answers for the examples, the surest first."""
    answers = {file.stem: python_answer(site, file) for file in (site / "examples").iterdir()}
    return dict(sorted(answers.items(), key=lambda item: -max(item[1].values())))


def best(answer):
    return max(answer, key=answer.get)


def apart(shown, expected):
    return max(abs(expected[label] - share) for label, share in shown.items())


def test_the_page_gives_the_classes_and_probabilities_of_python(expected, server, browser):
    browser.open(server.address)
    shown = {label: browser.click_example(label) for label in expected}
    assert all(len(answer) == 5 and list(answer.values()) == sorted(answer.values())[::-1] for answer in shown.values())
    surest = next(iter(expected))
    assert best(shown[surest]) == best(expected[surest])
    assert apart(shown[surest], expected[surest]) < 1e-2
    # A last bit of float turns a rounding to 4 bits in few images; most are the same.
    assert np.median([apart(shown[label], expected[label]) for label in expected]) < 1e-2
    assert not browser.complaints()


def test_a_large_photograph_is_classified_however_it_comes(site, expected, server, browser, tmp_path):
    surest = next(iter(expected))
    small = Image.open(site / "examples" / f"{surest}.png")
    wide = Image.new("RGB", (900, 512), "red")  # margins that the middle square leaves out
    wide.paste(small.resize((512, 512), Image.Resampling.NEAREST), (194, 0))
    wide.save(tmp_path / "chosen.png")
    browser.open(server.address)
    browser.choose(tmp_path / "chosen.png")
    chosen = browser.answer("chosen.png")
    assert best(chosen) == best(expected[surest])
    assert apart(chosen, expected[surest]) < 0.05
    give = """
        const [source, name, kind] = arguments;
        const data = new DataTransfer();
        data.items.add(new File([await (await fetch(source)).blob()], name, { type: "image/png" }));
        document.dispatchEvent(kind === "drop" ? new DragEvent("drop", { dataTransfer: data, cancelable: true })
                                               : new ClipboardEvent("paste", { clipboardData: data }));
    """
    for kind in ("drop", "paste"):
        browser.driver.execute_script(give, f"examples/{surest}.png", f"{kind}.png", kind)
        answer = browser.answer(f"{kind}.png")
        assert apart(answer, expected[surest]) < 1e-2
    assert not browser.complaints()


def test_the_page_works_once_its_server_is_gone(expected, server, browser):
    browser.open(server.address)
    before = {label: browser.click_example(label) for label in list(expected)[:2]}
    browser.wait(lambda: "works offline" in browser.text("#status"))
    assert not browser.complaints()
    server.stop()
    browser.open("about:blank")
    browser.open(server.address)
    assert {label: browser.click_example(label) for label in before} == before


def test_the_page_fits_a_phone_and_obeys_the_keyboard(server, browser):
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.open(server.address)
    browser.wait(lambda: browser.find("#examples img"))
    assert browser.driver.execute_script("return document.documentElement.scrollWidth") <= 390
    focus = []
    for _ in range(2):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        focus.append(browser.driver.switch_to.active_element)
    assert focus[0].get_attribute("id") == "file"
    name = focus[1].accessible_name
    assert name.startswith("example: ")
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    assert browser.answer(name)
    assert focus[1].get_attribute("aria-pressed") == "true"


def test_what_cannot_work_is_said(site, server, browser, tmp_path):
    def complaint():
        return browser.wait(lambda: browser.text("#error"))

    browser.open(server.address)
    (tmp_path / "words.png").write_text("no image")
    browser.choose(tmp_path / "words.png")
    assert "words.png cannot be read as an image" in complaint()

    browser.wait(lambda: "works offline" in browser.text("#status"))
    (site / "model.onnx").rename(tmp_path / "model.onnx")
    try:
        browser.open(server.address)
        assert "model.onnx is not here" in complaint() and "make web" in complaint()
    finally:
        (tmp_path / "model.onnx").rename(site / "model.onnx")

    remove = {"source": "delete globalThis.WebAssembly"}
    browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", remove)
    browser.open(server.address)
    assert "no WebAssembly" in complaint()
