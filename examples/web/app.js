// Classifies an image with model.onnx in onnxruntime-web. Everything the page loads lies beside it.
"use strict";

const $ = (id) => document.getElementById(id);
const TOP = 5;
const MISSING = "Run `make web` in the repository, then serve examples/web.";

function fail(text) {
  $("error").textContent = text;
  $("error").hidden = false;
}

async function load() {
  if (location.protocol === "file:") throw new Error("Browsers load no model from file: addresses. " +
    "Serve the page: python -m http.server --directory examples/web");
  if (typeof WebAssembly !== "object") throw new Error("This browser has no WebAssembly, or it is switched off.");
  const ort = await import("./vendor/ort.wasm.bundle.min.mjs").catch(() => {
    throw new Error(`onnxruntime-web is not here. ${MISSING}`);
  });
  ort.env.wasm.wasmPaths = { wasm: new URL("vendor/ort-wasm-simd-threaded.wasm", location.href).href };
  ort.env.wasm.numThreads = 1; // more would need headers that simple servers do not send
  const [facts, bytes] = await Promise.all([
    fetched("model.json").then((r) => r.json()),
    fetched("model.onnx").then((r) => r.arrayBuffer()),
  ]);
  let session;
  try {
    session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
  } catch (error) {
    throw new Error(`onnxruntime-web cannot run the model in this browser (it needs WebAssembly with SIMD): ${error.message}`);
  }
  const model = { facts, kilobytes: bytes.byteLength / 1e3, ...reader(ort, session, facts) };
  await model.probabilities(new Uint8ClampedArray(4 * facts.input_size[1] * facts.input_size[2])); // a first, slow run
  return model;
}

async function fetched(name) {
  const response = await fetch(name).catch(() => null);
  if (!response?.ok) throw new Error(`${name} is not here. ${MISSING}`);
  return response;
}

function reader(ort, session, { mean, std, input_size: [channels, height, width] }) {
  // float32 at every step, as in Python: a 4-bit model can answer to the last bit of its input
  const normalised = mean.map((_, c) => Float32Array.from({ length: 256 }, (_, value) => {
    const [m, s] = [Math.fround(mean[c]), Math.fround(std[c])];
    return Math.fround(Math.fround(value / 255) - m) / s;
  }));
  return {
    async probabilities(rgba) {
      const size = height * width;
      const input = new Float32Array(channels * size);
      for (let c = 0; c < channels; c++) {
        for (let i = 0; i < size; i++) input[c * size + i] = normalised[c][rgba[4 * i + c]];
      }
      const images = new ort.Tensor("float32", input, [1, channels, height, width]);
      const start = performance.now();
      const { logits } = await session.run({ images });
      const milliseconds = performance.now() - start;
      return { shares: softmax(logits.data), milliseconds };
    },
  };
}

function softmax(logits) {
  const top = Math.max(...logits);
  const powers = Array.from(logits, (x) => Math.exp(x - top));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((x) => x / sum);
}

/** The middle square of an image at the model's size: halved while that is possible, so that no pixel is skipped. */
async function shrunk(blob, [, height, width]) {
  const image = await createImageBitmap(blob);
  let side = Math.min(image.width, image.height);
  let source = [image, (image.width - side) / 2, (image.height - side) / 2];
  let canvas;
  do {
    const half = Math.ceil(side / 2);
    const [w, h] = half >= Math.max(width, height) && half < side ? [half, half] : [width, height];
    canvas = Object.assign(document.createElement("canvas"), { width: w, height: h });
    const pen = canvas.getContext("2d", { willReadFrequently: true });
    pen.fillStyle = "white"; // behind transparent pixels
    pen.fillRect(0, 0, w, h);
    pen.imageSmoothingQuality = "high";
    pen.drawImage(...source, side, side, 0, 0, w, h);
    source = [canvas, 0, 0];
    side = w;
  } while (canvas.width !== width || canvas.height !== height);
  image.close();
  return canvas;
}

function show({ classes }, { shares, milliseconds }, name) {
  const order = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, TOP);
  $("result").replaceChildren(...order.map((index) => {
    const row = document.createElement("li");
    const [label, share, bar] = ["span", "span", "i"].map((tag) => row.appendChild(document.createElement(tag)));
    label.textContent = classes[index];
    share.textContent = `${(100 * shares[index]).toFixed(1)} %`;
    bar.style.setProperty("--share", `${100 * shares[index]}%`);
    return row;
  }));
  $("time").textContent = `${milliseconds.toFixed(1)} ms · ${name}`;
}

function listen(model) {
  let latest = 0;

  async function classify(blob, name, button) {
    const turn = ++latest;
    $("error").hidden = true;
    try {
      const canvas = await shrunk(blob, model.facts.input_size);
      const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      const answer = await model.probabilities(pixels);
      if (turn !== latest) return; // another image was chosen meanwhile
      Object.assign($("preview"), { width: canvas.width, height: canvas.height, hidden: false, ariaLabel: name });
      $("preview").getContext("2d").drawImage(canvas, 0, 0);
      show(model.facts, answer, name);
      for (const other of $("examples").children) other.ariaPressed = String(other === button);
    } catch (error) {
      if (turn === latest) fail(`${name} cannot be read as an image. (${error.message})`);
    }
  }

  function first(transfer) {
    const file = [...(transfer?.files ?? [])][0];
    if (file) classify(file, file.name);
    return Boolean(file);
  }

  $("file").disabled = false;
  $("file").addEventListener("change", () => {
    first($("file"));
    $("file").value = ""; // the same file can be chosen again
  });
  document.addEventListener("paste", (event) => first(event.clipboardData));
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("over");
  });
  document.addEventListener("dragleave", () => document.body.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("over");
    if (!first(event.dataTransfer)) fail("That was not a file. Save the image, then drop the file.");
  });

  $("examples").replaceChildren(...model.facts.classes.map((name) => {
    const button = Object.assign(document.createElement("button"), { type: "button", ariaPressed: "false" });
    const image = Object.assign(document.createElement("img"), {
      src: `examples/${name}.png`, alt: `example: ${name}`, width: 32, height: 32, draggable: false,
    });
    button.append(image);
    button.addEventListener("click", async () => classify(await (await fetch(image.src)).blob(), image.alt, button));
    return button;
  }));
}

async function keepForOffline() {
  if (!("serviceWorker" in navigator)) return "needs its server: this browser keeps pages only from https or localhost";
  try {
    await navigator.serviceWorker.register("sw.js");
    await navigator.serviceWorker.ready;
    return "works offline from now on";
  } catch (error) {
    return `needs its server: ${error.message}`;
  }
}

load().then(async (model) => {
  const { facts, kilobytes } = model;
  const bits = `${Math.min(...facts.weight_bits)}-bit weights, ${Math.min(...facts.activation_bits)}-bit activations`;
  const about = `ViT for CIFAR-10, ${bits}, ${kilobytes.toFixed(0)} kB`;
  listen(model);
  $("status").textContent = about;
  $("status").textContent = `${about} · ${await keepForOffline()}`;
}).catch((error) => {
  fail(error.message);
  $("status").textContent = "";
});
