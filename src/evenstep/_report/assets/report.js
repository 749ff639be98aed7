// Draws the charts of a report: lines and areas with uPlot, heat maps on a canvas of their own.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("chart-data").textContent);
  const NONE = 65535; // of a heat map: nothing is known there
  const REDRAW = [];

  const color = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const said = (value, unit) =>
    value == null ? "unknown" : (value >= 1000 ? whole : digits).format(value) + unitText(unit);
  const unitText = (unit) => (unit === "%" ? " %" : unit ? " " + unit : "");
  const steps = (chart, at) => {
    const from = chart.x[at], to = from + chart.width - 1;
    return from === to ? `Step ${whole.format(from)}` : `Steps ${whole.format(from)} to ${whole.format(to)}`;
  };

  // Stretches with new plans, which get a tick; of more, none would stand out.
  const marked = (chart) => {
    const noted = Object.keys(chart.notes || {});
    return noted.length > chart.x.length / 4 ? [] : noted.map(Number);
  };

  // What a reader has pointed at, in words: by mouse, by touch, or with the slider's keys.
  function reader(box, chart, words, values) {
    const notes = chart.notes || {};
    const slider = box.parentNode.querySelector("input[type=range]");
    const output = box.parentNode.querySelector("output");
    const told = [];
    const show = (at, row) => {
      slider.value = at;
      const noted = notes[at] ? `; ${notes[at]}` : "";
      const text = `${steps(chart, at)}: ${words(at, row)}${noted}`;
      output.textContent = text;
      slider.setAttribute("aria-valuetext", text);
      told.forEach((tell) => tell(at));
    };
    slider.max = chart.x.length - 1;
    const last = values ? values.findLastIndex((value) => value != null) : -1;
    slider.addEventListener("input", () => show(Number(slider.value)));
    show(last < 0 ? chart.x.length - 1 : last);
    return { show, moved: (tell) => told.push(tell) };
  }

  function axes(chart) {
    const ink = color("--quiet"), grid = { stroke: color("--rule"), width: 1 };
    const font = "12px system-ui, sans-serif";
    const look = { stroke: ink, grid, font, ticks: { show: false } };
    return [
      { ...look, grid: { show: false }, size: 32, space: 80, values: (u, at) => at.map((v) => (v % 1 ? "" : whole.format(v))) },
      { ...look, size: 64, values: (u, at) => at.map((v) => digits.format(v) + (chart.unit === "s" ? " s" : "")) },
    ];
  }

  function plot(box, chart, data, series, bands, read) {
    const peaks = box.parentNode.querySelector(".peaks"), all = peaks.querySelector("input");
    peaks.hidden = !chart.focus;
    all.addEventListener("change", () => redraw());
    const top = (high) => (chart.focus && !all.checked ? chart.focus : (high || 1) * 1.05);
    const options = () => ({
      width: Math.max(box.clientWidth, 200),
      height: box.clientWidth < 500 ? 220 : 280,
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false }, sync: { key: chart.run } },
      scales: { x: { time: false }, y: { range: (u, low, high) => [0, top(high)] } },
      axes: axes(chart),
      series: [{}, ...series()],
      bands: bands(),
      hooks: {
        draw: [(u) => {
          u.ctx.fillStyle = color("--quiet");
          for (const at of marked(chart)) {
            const { top: above } = u.bbox, ratio = window.devicePixelRatio || 1;
            u.ctx.fillRect(u.valToPos(chart.x[at], "x", true), above, ratio, 6 * ratio);
          }
        }],
        setCursor: [(u) => { if (u.cursor.idx != null && u.cursor.left >= 0 && u.cursor.event) read.show(u.cursor.idx); }],
      },
    });
    let drawn = null;
    const redraw = () => {
      if (drawn) drawn.destroy();
      drawn = new uPlot(options(), data, box);
    };
    redraw();
    read.moved((at) => {
      const left = drawn.valToPos(chart.x[at], "x");
      drawn.setCursor({ left, top: 10 }, false);
    });
    REDRAW.push(redraw);
    return redraw;
  }

  function lines(box, chart) {
    const at = (name) => chart.series.findIndex((one) => one.role === name);
    const shown = chart.series.filter((one) => !one.role);
    const read = reader(box, chart, (x) =>
      shown.map((one) => `${one.label} ${said(one.values[x], chart.unit)}`).join("; "), shown[0].values);
    const series = () => chart.series.map((one) => ({
      stroke: one.role ? "transparent" : color(one.color),
      width: one.role ? 0 : 2,
      dash: one.dash,
      points: { show: chart.x.length === 1 && !one.role, size: 6 },
      paths: one.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
    }));
    const low = at("least"), high = at("most");
    const bands = () => (low < 0 ? [] : [{ series: [high + 1, low + 1], fill: color("--band") }]);
    return plot(box, chart, [chart.x, ...chart.series.map((one) => one.values)], series, bands, read);
  }

  function areas(box, chart) {
    const sums = [];
    let below = chart.x.map(() => 0);
    for (const one of chart.series) {
      below = below.map((sum, at) => (one.values[at] == null ? null : sum + one.values[at]));
      sums.unshift(below); // the highest first: lower ones are painted over it
    }
    const colors = chart.series.map((one) => one.color).reverse();
    const read = reader(box, chart, (x) =>
      chart.series.filter((one) => one.values[x] > 0)
        .sort((a, b) => b.values[x] - a.values[x])
        .map((one) => `${one.label} ${said(one.values[x], chart.unit)}`).join("; ") || "nothing is known", chart.series[0].values);
    const series = () => colors.map((name) => ({
      width: 0, fill: color(name), points: { show: false },
      paths: uPlot.paths.stepped({ align: 1 }),
    }));
    return plot(box, chart, [chart.x, ...sums], series, () => [], read);
  }

  function numbers(text) {
    const raw = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
    const view = new DataView(raw.buffer);
    return Array.from({ length: raw.length / 2 }, (_, at) => view.getUint16(2 * at, true));
  }

  const parts = (name) => color(name).split(",").map(Number); // colors of heat maps are "r, g, b"

  function heat(box, chart) {
    const values = numbers(chart.values), columns = chart.x.length, rows = chart.rows.length;
    const value = (x, y) => {
      const raw = values[y * columns + x];
      return raw === NONE ? null : (raw / (NONE - 1)) * (chart.high - chart.low) + chart.low;
    };
    const name = (y) => (chart.rows[y] ? `rank ${y} (${chart.rows[y]})` : `rank ${y}`);
    const read = reader(box, chart, (x, row) => {
      if (row != null) return `${name(row)} ${said(value(x, row), chart.unit)}`;
      const known = chart.rows.map((_, y) => [value(x, y), y]).filter(([v]) => v != null);
      known.sort((a, b) => b[0] - a[0]);
      const most = known.slice(0, 3).map(([v, y]) => `${name(y)} ${said(v, chart.unit)}`);
      return most.length ? (rows > 3 ? "highest are " : "") + most.join(", ") : "nothing is known";
    }, chart.x.map((_, x) => (chart.rows.some((_, y) => value(x, y) != null) ? x : null)));
    const canvas = document.createElement("canvas");
    box.append(canvas);
    const left = 40, top = 8, bottom = 22;
    let pointed = Number(box.parentNode.querySelector("input[type=range]").value);
    const size = () => {
      const width = Math.max(box.clientWidth, 200) - left;
      return { width, height: rows <= 32 ? Math.max(rows * 16, 64) : 512 };
    };
    function image() {
      const picture = document.createElement("canvas");
      picture.width = columns; picture.height = rows;
      const pen = picture.getContext("2d"), pixels = pen.createImageData(columns, rows);
      const scale = [0, 1, 2].map((at) => parts(`--${chart.colors}-${at}`)), none = parts("--heat-none");
      values.forEach((raw, at) => {
        const share = raw === NONE ? 0 : (2 * raw) / (NONE - 1), from = Math.min(Math.floor(share), 1);
        const mixed = raw === NONE ? none
          : scale[from].map((low, i) => low + (share - from) * (scale[from + 1][i] - low));
        pixels.data.set([...mixed, 255], 4 * at);
      });
      pen.putImageData(pixels, 0, 0);
      return picture;
    }
    let picture = image();
    function paint() {
      const { width, height } = size(), ratio = window.devicePixelRatio || 1;
      canvas.width = (width + left) * ratio; canvas.height = (top + height + bottom) * ratio;
      canvas.style.width = `${width + left}px`; canvas.style.height = `${top + height + bottom}px`;
      const pen = canvas.getContext("2d");
      pen.scale(ratio, ratio);
      pen.translate(0, top);
      pen.imageSmoothingEnabled = rows > height * ratio || columns > width * ratio;
      pen.drawImage(picture, left, 0, width, height);
      pen.fillStyle = color("--quiet");
      pen.font = "12px system-ui, sans-serif";
      pen.textAlign = "right"; pen.textBaseline = "middle";
      const every = Math.ceil((18 * rows) / height);
      for (let y = 0; y < rows; y += every) pen.fillText(y, left - 6, ((y + 0.5) * height) / rows);
      pen.textBaseline = "alphabetic";
      const last = chart.x[columns - 1] + chart.width - 1;
      pen.textAlign = "left"; pen.fillText(whole.format(chart.x[0]), left, height + 16);
      pen.textAlign = "center"; pen.fillText("step", left + width / 2, height + 16);
      pen.textAlign = "right"; pen.fillText(whole.format(last), left + width, height + 16);
      for (const at of marked(chart)) {
        pen.fillRect(left + ((at + 0.5) * width) / columns - 0.5, -6, 1, 5);
      }
      pen.strokeStyle = color("--ink");
      pen.strokeRect(left + ((pointed + 0.5) * width) / columns, 0, 0.1, height);
    }
    read.moved((at) => { pointed = at; paint(); });
    const point = (event) => {
      const { width, height } = size(), frame = canvas.getBoundingClientRect();
      const x = Math.floor(((event.clientX - frame.left - left) / width) * columns);
      const y = Math.floor(((event.clientY - frame.top - top) / height) * rows);
      if (x >= 0 && x < columns && y >= 0 && y < rows) read.show(x, y);
    };
    canvas.addEventListener("pointermove", point);
    canvas.addEventListener("pointerdown", point);
    const redraw = () => { picture = image(); paint(); };
    paint();
    REDRAW.push(redraw);
    return paint;
  }

  const draw = { lines, areas, heat };
  for (const box of document.querySelectorAll("[data-chart]")) {
    const chart = charts[box.dataset.chart];
    const redraw = draw[chart.kind](box, chart);
    let width = box.clientWidth;
    new ResizeObserver(() => {
      if (box.clientWidth && box.clientWidth !== width) { width = box.clientWidth; redraw(); }
    }).observe(box);
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => REDRAW.forEach((redraw) => redraw()));
})();
