// Draws the wiring page from its data block: the map of layers, the heads of one core, the sources of one read, the
// text, the load. A click chooses; everything below what was clicked is drawn again.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("wiring-data").textContent);
  const { reads, writes, text } = data;
  const R = reads.names.length, W = writes.names.length;
  const config = { displayModeBar: false, responsive: true };
  const state = { view: "keys", core: 0, writeCore: null, read: 0, token: null };
  const TOP = 14;

  const unpack = (packed) => {
    const bytes = Uint8Array.from(atob(packed.data), (c) => c.charCodeAt(0));
    return Float32Array.from(new Int16Array(bytes.buffer), (value) => value * packed.factor);
  };
  const normalised = unpack(data.normalised);
  const spread = data.spread && unpack(data.spread);
  const shares = text && unpack(text.shares);
  const coreShares = text && unpack(text.coreShares);
  const seen = (read, write) => writes.sites[write] <= reads.sites[read];
  const escaped = (value) => value.replace(/&/g, "&amp;").replace(/</g, "&lt;"); // plotly reads some HTML in labels
  const visible = (token) => token.replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";
  const short = (core) =>
    core.replace(/^layer/, "").replace(".attention", " attn").replace(".ff", " ff").replace("unembedding", "out");
  const slotShort = (name) => name.replace(/^layer\d+\./, "");
  const percent = (value) => `${(100 * value).toFixed(1)} %`.replace("-", "−");
  const signed = (value, digits = 3) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
  const byId = (id) => document.getElementById(id);

  const RED = "#b2182b", BLUE = "#2166ac";
  const ground = () => (theme.isDark() ? "#2b2d2f" : "#f1f0ec");
  const diverging = () => [[0, BLUE], [0.25, theme.isDark() ? "#3f6f9c" : "#8db8d8"], [0.5, ground()], [0.75, theme.isDark() ? "#a8554b" : "#eb9b80"], [1, RED]];

  function layout(more) {
    const style = getComputedStyle(document.body);
    const rule = getComputedStyle(document.querySelector("h2")).borderTopColor;
    const axis = { gridcolor: rule, linecolor: rule, zeroline: false, ticks: "", automargin: true };
    const { xaxis, yaxis, ...rest } = more;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: style.color, family: "system-ui, sans-serif", size: 12 },
      margin: { l: 60, r: 10, t: 8, b: 50 }, showlegend: false, hovermode: "closest",
      hoverlabel: { bgcolor: style.backgroundColor, bordercolor: rule, font: { color: style.color, size: 12 }, align: "left" },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      ...rest, xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis },
    };
  }

  // Listeners live on the plot, so they are added once, when it is first drawn.
  function draw(id, traces, more, onClick) {
    const plot = byId(id), isNew = !plot.data;
    Plotly.react(plot, traces, layout(more), config);
    if (isNew && onClick) plot.on("plotly_click", (event) => onClick(event.points[0]));
  }

  function heat(id, z, rows, columns, hover, { middle, reach, ticks, shapes, onClick, title }) {
    const height = Math.max(260, Math.min(620, 90 + rows.length * (rows.length > 30 ? 12 : 28)));
    byId(id).style.height = `${height}px`;
    const order = [...columns.keys()], lines = [...rows.keys()];
    const trace = {
      type: "heatmap", z, x: order, y: lines, customdata: hover, hovertemplate: "%{customdata}<extra></extra>",
      zmin: middle - reach, zmax: middle + reach, colorscale: diverging(), xgap: columns.length > 120 ? 0 : 1, ygap: rows.length > 60 ? 0 : 1,
      colorbar: { title: { text: title, side: "right" }, thickness: 12, outlinewidth: 0, tickformat: title.includes("share") ? ".0%" : ".2f" },
    };
    const tickEvery = Math.max(1, Math.ceil(ticks.labels.length / (byId(id).clientWidth < 600 ? 14 : 52)));
    const keep = (_, index) => index % tickEvery === 0;
    draw(id, [trace], {
      height, shapes,
      xaxis: { tickvals: ticks.places.filter(keep), ticktext: ticks.labels.filter(keep), tickangle: -90, showgrid: false, title: { text: "written by", standoff: 6 } },
      yaxis: { tickvals: lines, ticktext: rows, autorange: "reversed", showgrid: false, title: { text: "read by", standoff: 6 } },
    }, onClick);
  }

  const cell = (row, column) => ({
    type: "rect", x0: column[0] - 0.5, x1: column[1] + 0.5, y0: row[0] - 0.5, y1: row[1] + 0.5,
    line: { color: getComputedStyle(document.body).color, width: 2 },
  });

  function layerNumbers() {
    if (state.view === "keys") return data.cores;
    if (state.token === null) return text.coreShare;
    const [, rows, columns] = text.coreShares.shape;
    const start = state.token * rows * columns;
    return data.cores.map((row, r) => row.map((value, c) => (value === null ? null : coreShares[start + r * columns + c])));
  }

  function drawLayers() {
    const z = layerNumbers();
    const inText = state.view === "text";
    const hover = z.map((row, r) => row.map((value, c) => value === null ? "" :
      `<b>${reads.cores[r]}</b> ← <b>${writes.cores[c]}</b><br>` + (inText ? `supplied ${percent(value)} of what it saw`
        : `keys fit ${value.toFixed(3)} (unrelated: ${data.random.toFixed(3)})`)));
    const reach = inText ? Math.min(1, largest(z)) : Math.max(0.1, Math.min(data.random, largest(z) - data.random));
    const write = state.writeCore;
    heat("map-layers", z, reads.cores.map(short), writes.cores.map(short), hover, {
      middle: inText ? 0 : data.random, reach, title: inText ? "share" : "fit of keys",
      ticks: { places: [...writes.cores.keys()], labels: writes.cores.map(short) },
      shapes: [write === null ? cell([state.core, state.core], [0, columnsOf(state.core).lastCore]) : cell([state.core, state.core], [write, write])],
      onClick: (point) => {
        if (point.z === null) return;
        choose({ core: point.y, writeCore: point.x, read: reads.core.indexOf(point.y) });
      },
    });
    const where = inText ? (state.token === null ? "shares over the whole text" : `shares at token ${state.token}, “${visible(text.tokens[state.token])}”`) : "fit of keys";
    byId("map-title").textContent = `Layers: ${where}`;
  }

  function largest(z) {
    return Math.max(1e-6, ...z.flat().filter((value) => value !== null).map(Math.abs));
  }

  function columnsOf(core) {
    const site = reads.sites[reads.core.indexOf(core)];
    const number = writes.sites.filter((value) => value <= site).length;
    return { number, lastCore: writes.core[number - 1] };
  }

  // The slot table that is shown: keys, or shares over the whole text.
  const shown = () => (state.view === "text" ? shares : normalised);

  function drawHeads() {
    const rows = [...reads.names.keys()].filter((read) => reads.core[read] === state.core);
    const { number } = columnsOf(state.core);
    const values = shown(), inText = state.view === "text";
    const z = rows.map((read) => Array.from(values.subarray(read * W, read * W + number)));
    const hover = rows.map((read, r) => z[r].map((value, w) =>
      `<b>${reads.names[read]}</b> ← <b>${writes.names[w]}</b><br>` + numbers(read, w).join("<br>")));
    const cores = [...new Set(writes.core.slice(0, number))];
    const middle = (core) => (writes.core.indexOf(core) + writes.core.lastIndexOf(core)) / 2;
    const reach = Math.max(...z.flat().map(Math.abs), 1e-6);
    const marks = [];
    if (state.writeCore !== null) marks.push(cell([0, rows.length - 1], [writes.core.indexOf(state.writeCore), writes.core.lastIndexOf(state.writeCore)]));
    const place = rows.indexOf(state.read);
    if (place >= 0) marks.push(cell([place, place], [0, number - 1]));
    heat("map-heads", z, rows.map((read) => slotShort(reads.names[read])), writes.names.slice(0, number), hover, {
      middle: 0, reach, title: inText ? "share" : "normalised", shapes: marks,
      ticks: { places: cores.map(middle), labels: cores.map((core) => short(writes.cores[core])) },
      onClick: (point) => choose({ read: headRows()[point.y] }),
    });
    byId("heads-title").textContent = `Heads: what ${reads.cores[state.core]} reads`;
  }

  const headRows = () => [...reads.names.keys()].filter((read) => reads.core[read] === state.core);

  function numbers(read, write) {
    const place = read * W + write, length = reads.norm[read] * writes.norm[write];
    const lines = [`normalised ${signed(normalised[place])}`];
    const deviation = spread ? ` ± ${(spread[place] * length).toFixed(3)}` : "";
    lines.push(`raw ${signed(normalised[place] * length)}${deviation}`);
    if (shares) lines.push(`share on the text ${percent(shares[place])}`);
    return lines;
  }

  function drawSources() {
    const read = state.read, values = shown(), inText = state.view === "text";
    const order = [...writes.names.keys()].filter((write) => seen(read, write))
      .sort((a, b) => Math.abs(values[read * W + b]) - Math.abs(values[read * W + a])).slice(0, TOP);
    const x = order.map((write) => values[read * W + write]);
    draw("sources", [{
      type: "bar", orientation: "h", x, y: order.map((write) => writes.names[write]),
      marker: { color: x.map((value) => (value < 0 ? BLUE : RED)), opacity: 0.85 },
      customdata: order.map((write) => numbers(read, write).join("<br>")), hovertemplate: "<b>%{y}</b><br>%{customdata}<extra></extra>",
    }], {
      xaxis: { title: { text: inText ? "share of what was read" : "normalised", standoff: 6 }, tickformat: inText ? ".0%" : "~g", zeroline: true, nticks: 5 },
      yaxis: { autorange: "reversed", type: "category" }, margin: { l: 110, r: 10, t: 8, b: 45 },
    });
    byId("sources-title").textContent = `Sources of ${reads.names[read]}`;
    const head = ["write", "normalised", "raw", ...(shares ? ["share on the text"] : [])];
    const body = order.map((write) => {
      const place = read * W + write, length = reads.norm[read] * writes.norm[write];
      const raw = signed(normalised[place] * length) + (spread ? ` ± ${(spread[place] * length).toFixed(3)}` : "");
      return [writes.names[write], signed(normalised[place]), raw, ...(shares ? [percent(shares[place])] : [])];
    });
    byId("source-list").replaceChildren(table(head, body));
  }

  function table(head, rows) {
    const result = element("table"), top = element("thead"), line = element("tr"), body = element("tbody");
    result.className = "numbers";
    head.forEach((title) => line.append(element("th", title)));
    top.append(line);
    rows.forEach(([first, ...rest]) => {
      const row = element("tr");
      row.append(element("th", first), ...rest.map((value) => element("td", value)));
      body.append(row);
    });
    result.append(top, body);
    const scroll = element("div");
    scroll.className = "scroll";
    scroll.append(result);
    return scroll;
  }
  function element(name, content) {
    const result = document.createElement(name);
    if (content !== undefined) result.textContent = content;
    return result;
  }

  function drawReadChoice() {
    const choice = byId("read-choice");
    choice.replaceChildren(...headRows().map((read) => {
      const option = element("option", reads.names[read]);
      option.value = read;
      return option;
    }));
    choice.value = state.read;
  }

  function choose(change) {
    Object.assign(state, change);
    drawMap();
    if ("token" in change) drawToken();
  }

  function drawMap() {
    drawLayers();
    drawHeads();
    drawReadChoice();
    drawSources();
  }

  const tint = (share) => `color-mix(in srgb, ${theme.isDark() ? "#4a8fc2" : "#5aa0d0"} ${Math.round(85 * share)}%, transparent)`;

  function drawTokens() {
    const last = text.lens.followed.at(-1);
    byId("tokens").replaceChildren(...text.tokens.map((token, index) => {
      const button = element("button", visible(token));
      button.type = "button";
      const chance = index ? last[index - 1] : 0;
      button.style.background = tint(chance);
      button.title = index ? `predicted with probability ${percent(chance)}` : "the start of a text";
      button.setAttribute("aria-pressed", String(index === state.token));
      button.addEventListener("click", () => choose({ token: index === state.token ? null : index }));
      return button;
    }));
  }

  function drawToken() {
    const t = state.token ?? Math.max(0, text.tokens.length - 2);
    const isLast = t === text.tokens.length - 1;
    const next = isLast ? null : text.tokens[t + 1];
    byId("tokens").childNodes.forEach((button, index) => button.setAttribute("aria-pressed", String(index === t)));
    byId("token-title").textContent =
      `After “${visible(text.tokens[t])}” (token ${t}): predicted “${visible(text.predicted[t])}”` + (isLast ? "" : `, followed by “${visible(next)}”`);
    drawLens(t, next);
    drawAttribution(t, next);
  }

  function drawLens(t, next) {
    const { after, words, probability, followed } = text.lens;
    const head = ["after", "1st", "2nd", "3rd", "4th", "5th", ...(next === null ? [] : ["what followed"])].slice(0, words[0][t].length + 1 + (next === null ? 0 : 1));
    const result = table(head, after.map((core) => [core]));
    result.querySelectorAll("tbody tr").forEach((row, site) => {
      words[site][t].forEach((word, place) => {
        const item = element("td", visible(word)), chance = probability[site][t][place];
        item.append(element("small", ` ${Math.round(100 * chance)}%`));
        item.style.background = tint(chance);
        if (word === next) item.className = "hit";
        row.append(item);
      });
      if (next !== null) row.append(element("td", percent(followed[site][t])));
    });
    result.querySelector("table").className = "words";
    byId("lens").replaceChildren(result);
  }

  function drawAttribution(t, next) {
    const names = writes.cores;
    const bars = (values, colour, name) => ({
      type: "bar", orientation: "h", name: escaped(name), y: names, x: values, marker: { color: colour },
      hovertemplate: `%{y}: %{x:.3f}<br>to “${escaped(name)}”<extra></extra>`,
    });
    const sum = (values) => values.reduce((total, value) => total + value, 0);
    const predicted = text.attribution.predicted[t], traces = [bars(predicted, theme.isDark() ? "#56B4E9" : "#0072B2", visible(text.predicted[t]))];
    let title = `Where the logit of “${visible(text.predicted[t])}” comes from: ${sum(predicted).toFixed(2)} in sum`;
    if (next !== null && next !== text.predicted[t]) {
      const followed = text.attribution.followed[t];
      traces.push(bars(followed, "#D55E00", visible(next)));
      title += `; of “${visible(next)}”, which followed: ${sum(followed).toFixed(2)}`;
    }
    byId("attribution").style.height = `${110 + names.length * (names.length > 30 ? 16 : 30)}px`;
    draw("attribution", traces, {
      showlegend: traces.length > 1, legend: { orientation: "h", y: 1.08 }, barmode: "group", margin: { l: 110, r: 10, t: 30, b: 45 },
      xaxis: { title: { text: "contribution to the logit", standoff: 6 }, zeroline: true, tickformat: "~g", nticks: 6 },
      yaxis: { autorange: "reversed", type: "category" },
    });
    byId("attribution-title").textContent = title;
  }

  function drawLoad() {
    const x = data.load.map((one) => short(one.core));
    const line = (key, name, colour, dash = "solid") => ({
      x, y: data.load.map((one) => one[key]), name, mode: "lines+markers", line: { color: colour, dash, width: 2 }, marker: { size: 4 },
      hovertemplate: `<b>${name}</b><br>at %{x}: %{y:.4f}<extra></extra>`,
    });
    const grey = theme.isDark() ? "#9a9a95" : "#7a7a75", blue = theme.isDark() ? "#56B4E9" : "#0072B2";
    const legend = { showlegend: true, legend: { orientation: "h", y: 1.15 }, margin: { l: 55, r: 10, t: 30, b: 60 } };
    draw("plot-load", [line("interference", "this model", blue), line("interference_random", "random keys", grey, "dash"), line("interference_least", "least possible", grey, "dot")],
      { ...legend, xaxis: { tickangle: -90, title: { text: "core that reads", standoff: 6 } }, yaxis: { title: { text: "mean squared cosine" }, rangemode: "tozero" } });
    if (!data.history.length) {
      draw("plot-history", [line("effective_rank", "this model", blue), line("effective_rank_random", "random keys", grey, "dash")],
        { ...legend, xaxis: { tickangle: -90, title: { text: "core that reads", standoff: 6 } }, yaxis: { title: { text: "effective rank" }, rangemode: "tozero" } });
      return;
    }
    const steps = data.history.map((one) => one.step);
    const over = (key, name, colour, axis, dash = "solid") => ({
      x: steps, y: data.history.map((one) => one[key]), name, yaxis: axis, mode: "lines+markers", line: { color: colour, width: 2, dash },
      hovertemplate: `<b>${name}</b><br>step %{x}: %{y:.4f}<extra></extra>`,
    });
    draw("plot-history", [over("effective_rank", "effective rank", blue, "y"), over("interference", "interference", "#D55E00", "y2", "dash")],
      { ...legend, margin: { l: 55, r: 60, t: 30, b: 45 }, xaxis: { title: { text: "step", standoff: 6 }, nticks: 6 }, yaxis: { title: { text: "effective rank" } },
        yaxis2: { title: { text: "interference" }, overlaying: "y", side: "right", showgrid: false, tickformat: ".3f" } });
  }

  function drawCrosstalk() {
    const rows = text.crosstalk, grey = theme.isDark() ? "#9a9a95" : "#7a7a75", blue = theme.isDark() ? "#56B4E9" : "#0072B2";
    const points = (place, name, colour, symbol) => ({
      x: rows.map((row) => row[0]), y: rows.map((row) => row[place]), name, mode: "markers", marker: { color: colour, symbol, size: 6 },
      hovertemplate: `<b>%{x}</b><br>${name}: %{y:.3~g}<extra></extra>`,
    });
    draw("plot-crosstalk", [points(1, "this model", blue, "circle"), points(2, "random keys", grey, "line-ew-open")], {
      showlegend: true, legend: { orientation: "h", y: 1.15 }, margin: { l: 55, r: 10, t: 30, b: 90 },
      xaxis: { type: "category", tickangle: -90, showticklabels: rows.length <= 80 }, yaxis: { type: "log", title: { text: "mixed in / own" }, tickformat: "~g", dtick: 1 },
    });
  }

  function drawAll() {
    drawMap();
    if (text) {
      drawTokens();
      drawToken();
      drawCrosstalk();
    }
    drawLoad();
  }

  document.querySelectorAll("[data-view]").forEach((button) => {
    button.addEventListener("click", () => {
      for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
      choose({ view: button.dataset.view });
    });
  });
  byId("read-choice").addEventListener("change", (event) => choose({ read: Number(event.target.value) }));

  // Start at the strongest edge of the deeper half, so that there is something to see before the first click.
  let best = W * Math.floor(R / 2);
  for (let place = best; place < R * W; place++) if (Math.abs(normalised[place]) > Math.abs(normalised[best])) best = place;
  state.read = Math.floor(best / W);
  state.core = reads.core[state.read];
  state.writeCore = writes.core[best % W];
  document.addEventListener("themechange", drawAll);
  drawAll();
})();
