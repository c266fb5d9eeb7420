// Keeps every file of the page, so that it works without its server. While the server answers, its files win.
"use strict";

const CACHE = "maskaq";
const FILES = [
  "./", "index.html", "app.js", "style.css", "model.json", "model.onnx",
  "vendor/ort.wasm.bundle.min.mjs", "vendor/ort-wasm-simd-threaded.wasm",
];

/** A request that asks the server also where the browser's own cache has an answer. */
const fresh = (request) => new Request(request, { cache: "no-cache" });

async function fill() {
  const cache = await caches.open(CACHE);
  await cache.addAll(FILES.map(fresh));
  const { classes } = await (await cache.match("model.json")).json();
  await cache.addAll(classes.map((name) => fresh(`examples/${name}.png`)));
}

async function answer(request) {
  const cache = await caches.open(CACHE);
  try {
    const response = await fetch(fresh(request));
    if (response.ok) await cache.put(request, response.clone());
    return response;
  } catch (error) {
    const kept = await cache.match(request, { ignoreSearch: true });
    if (kept) return kept;
    throw error;
  }
}

self.addEventListener("install", (event) => {
  self.skipWaiting();
  event.waitUntil(fill());
});
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));
self.addEventListener("fetch", (event) => {
  const ours = new URL(event.request.url).origin === self.location.origin;
  if (ours && event.request.method === "GET") event.respondWith(answer(event.request));
});
