// Draws the report's curves from the data block, in the theme's colours, and again whenever a switch is pressed.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const state = { x: "log", y: "linear", range: "late", hidden: new Set() };
  const prices = { tokens: tokenUnit(), flops: flopUnit(), seconds: timeUnit() };
  const config = { displayModeBar: false, responsive: true };
  const fewModels = data.models.length <= 2;

  const colour = (model) => (theme.isDark() ? model.dark : model.light);
  const transparent = (hex, alpha) =>
    `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;
  const visible = () => data.models.filter((model, index) => !state.hidden.has(index));
  const text = (value) => value.replace(/&/g, "&amp;").replace(/</g, "&lt;"); // plotly reads some HTML in labels

  // The unit of each budget, so that its axis has small numbers, and how a point's budget reads.
  function largest(price) {
    const ends = data.models.flatMap((model) => model.train[price].slice(-1)).filter((value) => value > 0);
    return ends.length ? Math.max(...ends) : 0;
  }
  function thousands(price) {
    const end = largest(price);
    return end >= 1 ? 3 * Math.floor(Math.log10(end) / 3) : 0;
  }
  function tokenUnit() {
    const power = thousands("tokens");
    const name = { 0: "", 3: " (thousands)", 6: " (millions)", 9: " (billions)", 12: " (trillions)" }[power] ?? ` (10<sup>${power}</sup>)`;
    const short = { 0: "", 3: " k", 6: " M", 9: " G", 12: " T" }[power] ?? `e${power}`;
    return { factor: 10 ** power, title: `training tokens${name}`, hover: `%{x:.4~g}${short} tokens` };
  }
  function flopUnit() {
    const power = thousands("flops");
    return { factor: 10 ** power, title: `training FLOPs (10<sup>${power}</sup>)`, hover: `%{x:.3~g} × 10<sup>${power}</sup> FLOPs` };
  }
  function timeUnit() {
    const end = largest("seconds");
    const [factor, name] = [[3600, "h"], [60, "min"], [1, "s"]].find(([size]) => end >= 2 * size) ?? [1, "s"];
    return { factor, title: `training time (${name})`, hover: `%{x:.3~g} ${name}` };
  }
  const spent = (curve, price) => curve[price].map((value) => (value === null ? null : value / prices[price].factor));

  function layout(xaxis, yaxis) {
    const style = getComputedStyle(document.body);
    const rule = getComputedStyle(document.querySelector("h2")).borderTopColor;
    const axis = { gridcolor: rule, linecolor: rule, zeroline: false, ticks: "outside", tickcolor: rule, automargin: true };
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: style.color, family: "system-ui, sans-serif", size: 12 },
      margin: { l: 48, r: 10, t: 10, b: 44 },
      showlegend: false,
      hovermode: "closest",
      hoverlabel: { bgcolor: style.backgroundColor, bordercolor: rule, font: { color: style.color, size: 12 } },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      xaxis: { ...axis, ...xaxis },
      yaxis: { ...axis, ...yaxis },
    };
  }

  function lossTraces(model, price) {
    const traces = [];
    const { dev, train } = model;
    const hover = (kind) =>
      `<b>${text(model.label)}</b>, ${kind}<br>%{y:.4f}<br>step %{customdata}, ${prices[price].hover}<extra></extra>`;
    const hasDev = dev.step.length > 0;
    if (dev.deviation) {
      const low = dev.mean.map((value, i) => value - dev.deviation[i]);
      const high = dev.mean.map((value, i) => value + dev.deviation[i]);
      traces.push({
        x: [...spent(dev, price), ...spent(dev, price).reverse()],
        y: [...high, ...low.reverse()],
        fill: "toself", mode: "lines", line: { width: 0 }, fillcolor: transparent(colour(model), 0.2), hoverinfo: "skip",
      });
    }
    if (fewModels || !hasDev) {
      traces.push({
        x: spent(train, price), y: train.mean, customdata: train.step, mode: train.step.length > 1 ? "lines" : "markers",
        line: { color: transparent(colour(model), hasDev ? 0.5 : 1), width: 1.2 },
        marker: { color: colour(model) }, hovertemplate: hover("train"),
      });
    }
    if (hasDev) {
      traces.push({
        x: spent(dev, price), y: dev.mean, customdata: dev.step, mode: "lines+markers",
        line: { color: colour(model), width: 2, dash: model.dash }, marker: { size: 5, symbol: model.symbol },
        hovertemplate: hover("dev"),
      });
    }
    return traces;
  }

  function priceRange(price) {
    const end = largest(price) / prices[price].factor;
    if (!end || state.range === "all") return {};
    return { range: state.x === "log" ? [Math.log10(0.1 * end), Math.log10(1.06 * end)] : [0, 1.03 * end] };
  }

  function lossRange() {
    if (!data.late || state.range === "all") return {};
    return { range: state.y === "log" ? data.late.map(Math.log10) : data.late };
  }

  function draw(id, traces, xaxis, yaxis) {
    Plotly.react(id, traces, layout(xaxis, yaxis), config);
  }

  function drawAll() {
    for (const [price, { title }] of Object.entries(prices)) {
      const ticks = state.x === "log" ? { type: "log", dtick: state.range === "late" ? "D2" : 1 } : { type: "linear", nticks: 6 };
      draw(
        `loss-${price}`,
        visible().flatMap((model) => lossTraces(model, price)),
        { title: { text: title, standoff: 8 }, tickformat: "~g", ...ticks, ...priceRange(price) },
        { type: state.y, tickformat: "~g", nticks: 8, ...lossRange() },
      );
    }
    for (const [name, kind] of [["lr", "linear"], ["grad_norm", "log"]]) {
      const traces = visible().map((model) => ({
        x: model[name].step, y: model[name].mean, mode: model[name].step.length > 1 ? "lines" : "markers",
        line: { color: colour(model), width: 1.5, dash: model.dash }, marker: { color: colour(model) },
        hovertemplate: `<b>${text(model.label)}</b><br>%{y:.4~g}<br>step %{x}<extra></extra>`,
      }));
      draw(`plot-${name}`, traces, { title: { text: "step", standoff: 8 }, nticks: 6 }, { type: kind, tickformat: "~g", nticks: 6 });
    }
    drawLegend();
  }

  function drawLegend() {
    document.querySelectorAll(".legend button").forEach((button, index) => {
      const model = data.models[index];
      const dash = { solid: "", dash: "6 3", dashdot: "6 3 1 3", dot: "2 3" }[model.dash];
      button.querySelector("line").setAttribute("stroke", colour(model));
      button.querySelector("line").setAttribute("stroke-dasharray", dash);
      button.setAttribute("aria-pressed", String(!state.hidden.has(index)));
    });
  }

  document.querySelectorAll(".legend button").forEach((button, index) => {
    button.addEventListener("click", () => {
      if (!state.hidden.delete(index)) state.hidden.add(index);
      drawAll();
    });
  });
  document.querySelectorAll(".switch button").forEach((button) => {
    button.addEventListener("click", () => {
      state[button.dataset.set] = button.dataset.value;
      for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
      drawAll();
    });
  });
  document.addEventListener("themechange", drawAll);
  drawAll();
})();
