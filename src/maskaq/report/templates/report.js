"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

// ---- charts: figures come without colours, the theme gives them

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const narrow = () => window.innerWidth < 640;
const byTouch = matchMedia("(hover: none) and (pointer: coarse)").matches;

function themed(layout) {
  const axis = {
    gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--line"),
    tickcolor: css("--line"), automargin: true, fixedrange: false,
  };
  const result = {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--fg") },
    colorway: ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"].map(css),
    hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--fg") } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--muted"), activecolor: css("--c1") },
    dragmode: byTouch ? false : "zoom", // a finger scrolls the page; the buttons zoom
  };
  for (const name of ["xaxis", "yaxis", "xaxis2", "yaxis2"]) {
    if (layout[name]) result[name] = { ...axis, ...layout[name] };
  }
  return result;
}

function draw(plot, width) {
  const figure = DATA.figures[plot.id];
  const layout = themed(structuredClone(figure.layout));
  if (width) Object.assign(layout, { width, autosize: false });
  if (narrow() && layout.legend) layout.legend = { ...layout.legend, font: { size: 11 } };
  const data = structuredClone(figure.data);
  for (const trace of data) { // lines that belong together share a colour
    if (trace.meta) trace.line = { ...trace.line, color: layout.colorway[trace.meta.colour % layout.colorway.length] };
  }
  return Plotly.react(plot, data, layout, {
    displaylogo: false, responsive: true, displayModeBar: "hover",
    showSendToCloud: false, // this page sends nothing anywhere
    modeBarButtonsToRemove: ["lasso2d", "select2d", "sendChartToCloud", "sendDataToCloud", "autoScale2d"],
  });
}

let following = false;
function zoomTogether(plot) {
  const group = DATA.groups[plot.id];
  plot.on("plotly_relayout", (change) => {
    const keys = Object.keys(change).filter((key) => key.startsWith("xaxis."));
    if (!group || following || !keys.length) return;
    following = true;
    const update = Object.fromEntries(keys.map((key) => [key, change[key]]));
    const others = plots.filter((other) => other !== plot && DATA.groups[other.id] === group);
    Promise.all(others.map((other) => Plotly.relayout(other, update))).finally(() => { following = false; });
  });
}

const plots = [...document.querySelectorAll(".plot")];
const drawn = Promise.all(plots.map((plot) => draw(plot).then(() => zoomTogether(plot))));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => draw(plot)));
drawn.then(() => document.documentElement.setAttribute("data-drawn", String(plots.length)));

// ---- one image on its way

function showFrame() {
  const films = [...document.querySelectorAll(".film")], range = $("strip-step");
  films.forEach((film, i) => { film.hidden = i !== Number($("strip-round").value); });
  const film = films.find((film) => !film.hidden), frames = film.children;
  $("strip-whose").textContent = film.dataset.whose;
  range.max = frames.length - 1;
  const frame = frames[Number(range.value)];
  $("strip-image").src = frame.src;
  $("strip-image").alt = $("strip-label").textContent = frame.alt;
}
if ($("strip-step")) {
  $("strip-step").addEventListener("input", showFrame);
  $("strip-round").addEventListener("change", () => { $("strip-step").max = $("strip-step").value = 999; showFrame(); });
  showFrame();
}

// ---- attention over an image

const RAMP = [[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]];
function colour(value) {
  const at = (value / 255) * (RAMP.length - 1), i = Math.min(Math.floor(at), RAMP.length - 2), t = at - i;
  return RAMP[i].map((low, c) => Math.round(low + (RAMP[i + 1][c] - low) * t));
}
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

function attention(facts) {
  const count = facts.images.length;
  const layers = facts.layers.map((layer) => ({ ...layer, maps: bytes(layer.maps) }));
  const masks = {};
  for (const kind of ["region", "mask", "thinned"]) {
    masks[kind] = Object.fromEntries(Object.entries(facts[kind]).map(([grid, text]) => [grid, bytes(text)]));
  }
  const pictures = facts.images.map((image) => Object.assign(new Image(), { src: image.src }));

  function paint(canvas, model, image, layer) {
    const [rows, columns] = layer.grid, patches = rows * columns, side = 448;
    const context = canvas.getContext("2d"), picture = pictures[image];
    canvas.width = side; canvas.height = Math.round((side * picture.naturalHeight) / picture.naturalWidth);
    context.imageSmoothingEnabled = picture.naturalWidth > 64;
    context.filter = model >= 0 ? "grayscale(1)" : "none"; // below a map, colours would mix with the map's
    context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    context.filter = "none";
    const w = canvas.width / columns, h = canvas.height / rows;
    if (model >= 0) {
      const map = layer.maps.subarray((model * count + image) * patches, (model * count + image + 1) * patches);
      map.forEach((value, n) => {
        const [r, g, b] = colour(value);
        context.fillStyle = `rgba(${r}, ${g}, ${b}, 0.72)`;
        context.fillRect((n % columns) * w, Math.floor(n / columns) * h, w + 0.5, h + 0.5);
      });
    }
    const mask = (kind) => masks[kind][layer.masks].subarray(image * patches, (image + 1) * patches);
    const each = (kind, act) => mask(kind).forEach((on, n) => on && act((n % columns) * w, Math.floor(n / columns) * h));
    context.strokeStyle = context.fillStyle = "#19d3ff";
    if ($("show-region").checked) {
      context.lineWidth = 1;
      each("region", (x, y) => context.strokeRect(x + 2, y + 2, w - 4, h - 4));
    }
    if ($("show-mask").checked) {
      context.lineWidth = 4;
      each("mask", (x, y) => context.strokeRect(x + 2, y + 2, w - 4, h - 4));
    }
    if ($("show-thinned").checked) {
      each("thinned", (x, y) => { // a disc: the map stays visible around it
        context.beginPath(); context.arc(x + w / 2, y + h / 2, Math.min(w, h) / 5, 0, 7); context.fill();
      });
    }
  }

  function show() {
    const image = Number($("map-image").value), index = Number($("map-layer").value), layer = layers[index];
    $("map-label").textContent = `${index + 1} of ${layers.length}: ${layer.name}`;
    $("map-whose").textContent = `image ${facts.images[image].number}: ${facts.images[image].name}, layer ${$("map-label").textContent}`;
    $("map-layer").setAttribute("aria-valuetext", `layer ${index + 1}, ${layer.name}`);
    document.querySelectorAll(".maps canvas").forEach((canvas) => {
      paint(canvas, Number(canvas.dataset.model), image, layer);
      canvas.setAttribute("aria-label", `${canvas.dataset.title}, image ${facts.images[image].number}, layer ${layer.name}`);
    });
  }
  for (const id of ["map-layer", "map-image", "show-region", "show-mask", "show-thinned"]) $(id).addEventListener("input", show);
  Promise.all(pictures.map((picture) => picture.decode())).then(show).then(() => $("maps").setAttribute("data-ready", "1"));
}
if (DATA.attention) attention(DATA.attention);

// ---- on paper: everything open, charts in the colours and width of a page

const closed = [];
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("paper");
  document.querySelectorAll("details:not([open])").forEach((d) => { d.open = true; closed.push(d); });
  plots.forEach((plot) => draw(plot, plot.closest(".charts") ? 330 : 680));
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("paper");
  closed.splice(0).forEach((d) => { d.open = false; });
  plots.forEach((plot) => draw(plot));
});
