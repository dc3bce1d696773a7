// Smoothing, zoom and values under the pointer. The page says all it has to say without this.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs || [data];
  const W = 1000, H = 240;
  const charts = [...document.querySelectorAll(".chart")];
  let part = null; // smoothing; null: as each curve came
  let zoom = null; // [first step, last step]

  const format = (v, step = 0) => {
    const a = Math.abs(v);
    if (a <= 1e-12 * step) return "0";
    const digits = step ? Math.min(15, Math.max(4, Math.ceil(Math.log10(a / step)) + 2)) : 4;
    for (const [unit, sign] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (a >= unit && a < 1e13) return +(v / unit).toPrecision(digits) + sign;
    }
    return a < 1e-3 || a >= 1e13 ? v.toExponential(digits - 1).replace(/\.?0*e\+?/, "e") : String(+v.toPrecision(digits));
  };
  const at = (s, v) => {
    if (s.log) return (Math.log(Math.max(v, 1e-300)) - Math.log(s.low)) / (Math.log(s.high) - Math.log(s.low));
    return s.high > s.low ? (v - s.low) / (s.high - s.low) : 0.5;
  };
  const ticks = (s, most = 6) => {
    if (s.log) {
      const a = Math.ceil(Math.log10(s.low) - 1e-9), b = Math.floor(Math.log10(s.high) + 1e-9);
      if (b > a) {
        const stride = Math.ceil((b - a + 1) / most), found = [];
        for (let p = a; p <= b; p++) if (stride === 1 || p % stride === 0) found.push(10 ** p);
        return found;
      }
    }
    const span = s.high - s.low;
    if (!(span > 0)) return [s.low];
    const raw = span / (most - 1), size = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((f) => f * size).find((x) => x >= raw * 0.999);
    const found = [];
    for (let i = Math.ceil(s.low / step - 1e-9); i <= Math.floor(s.high / step + 1e-9); i++) found.push(i * step);
    return found;
  };
  const valueScale = (low, high) => {
    if (low > 0 && high / low > 100) {
      const m = (high / low) ** 0.05;
      return { low: low / m, high: high * m, log: true };
    }
    const m = high - low <= Math.abs(high) * 1e-9 ? Math.abs(high) * 0.1 || 1 : 0.05 * (high - low);
    return { low: low >= 0 && low - m < 0 ? 0 : low - m, high: high + m, log: false };
  };
  // On a logarithmic scale the curve is smoothed as it is seen: otherwise its greatest values would be all of it.
  const smooth = (values, p, log) => {
    if (log && values.every((v) => v > 0)) return smooth(values.map(Math.log), p, false).map(Math.exp);
    let average = 0, weight = 0;
    return values.map((v) => {
      average = p * average + (1 - p) * v;
      weight = p * weight + 1 - p;
      return average / weight;
    });
  };
  // A key is JSON, since not each of its signs can stand in an attribute.
  const curveOf = (run, figure) => run.curves[JSON.parse(figure.dataset.key)];
  const curvesOf = (figure) => runs.map((run) => curveOf(run, figure)).filter((c) => c && c.x.length);

  const draw = (figure) => {
    const curves = curvesOf(figure);
    const all = [Math.min(...curves.map((c) => c.x[0])), Math.max(...curves.map((c) => c.x[c.x.length - 1]))];
    const [first, last] = zoom || all;
    const xs = { low: first, high: last, log: false };
    // One bucket beyond each edge, so that lines go to the edges.
    const shown = curves.map((c) => {
      let a = c.x.findIndex((x) => x >= first), b = c.x.findIndex((x) => x > last);
      if (a < 0) a = c.x.length - 1;
      if (b < 0) b = c.x.length - 1;
      return [Math.max(0, a - 1), b];
    });
    let low = Infinity, high = -Infinity;
    curves.forEach((c, i) => {
      for (let k = shown[i][0]; k <= shown[i][1]; k++) {
        low = Math.min(low, c.low[k]);
        high = Math.max(high, c.high[k]);
      }
    });
    const ys = valueScale(low, high);
    const X = (x) => (W * at(xs, x)).toPrecision(5), Y = (y) => (H * (1 - at(ys, y))).toPrecision(5);
    figure.querySelectorAll(".line").forEach((group, i) => {
      const c = curves[i], [a, b] = shown[i];
      const p = figure.classList.contains("plain") ? 0 : part === null ? (c.x.length < 60 ? 0 : 0.9) : part;
      const across = c.x.slice(a, b + 1).map(X);
      const path = (values) => (across.length > 1 ? "M" + values.slice(a, b + 1).map((v, k) => across[k] + " " + Y(v)).join(" ") : "M" + across[0] + " " + Y(values[a]) + "h0");
      group.querySelector(".mean").setAttribute("d", path(smooth(c.mean, p, ys.log)));
      const raw = group.querySelector(".raw"), band = group.querySelector(".band");
      if (raw) raw.setAttribute("d", path(c.mean));
      if (band) {
        const up = across.map((x, k) => x + " " + Y(c.high[a + k]));
        const down = across.map((x, k) => x + " " + Y(c.low[a + k])).reverse();
        band.setAttribute("d", "M" + up.join(" ") + " " + down.join(" ") + "Z");
      }
    });
    const place = (box, side, values, scale, turn) => {
      const step = scale.log || values.length < 2 ? 0 : values[1] - values[0];
      box.replaceChildren(...values.map((v) => {
        const span = document.createElement("span");
        span.textContent = format(v, step);
        span.style.cssText = side + ":" + (100 * (turn ? 1 - at(scale, v) : at(scale, v))).toFixed(2) + "%";
        return span;
      }));
    };
    place(figure.querySelector(".y"), "top", ticks(ys), ys, true);
    place(figure.querySelector(".x"), "left", ticks(xs).filter(Number.isInteger), xs, false);
    figure.querySelector(".grid").innerHTML = ticks(ys).map((v) => `<path d="M0 ${Y(v)}H${W}"/>`).join("");
    figure.range = [first, last];
  };

  const frame = (() => {
    let asked = false;
    return () => {
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => { asked = false; charts.forEach(draw); });
    };
  })();

  const svgElement = (name) => document.createElementNS("http://www.w3.org/2000/svg", name);
  const reset = document.getElementById("reset");
  const setZoom = (range) => {
    zoom = range;
    if (reset) reset.hidden = !range;
    frame();
  };

  charts.forEach((figure) => {
    const svg = figure.querySelector("svg"), plot = figure.querySelector(".plot");
    const curves = curvesOf(figure);
    figure.range = [Math.min(...curves.map((c) => c.x[0])), Math.max(...curves.map((c) => c.x[c.x.length - 1]))];
    const cursor = svgElement("path"), chosen = svgElement("rect"), tip = document.createElement("div");
    cursor.setAttribute("class", "cursor");
    chosen.setAttribute("class", "chosen");
    tip.className = "tip";
    let start = null;
    const stepAt = (event) => {
      const box = svg.getBoundingClientRect();
      const f = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      return [f, figure.range[0] + f * (figure.range[1] - figure.range[0])];
    };
    const clear = () => { cursor.remove(); tip.remove(); };
    svg.addEventListener("pointermove", (event) => {
      const [f, step] = stepAt(event);
      cursor.setAttribute("d", `M${W * f} 0V${H}`);
      svg.append(cursor);
      const lines = curves.map((c, i) => {
        let k = c.x.findIndex((x) => x >= step);
        if (k < 0) k = c.x.length - 1;
        if (k > 0 && step - c.x[k - 1] < c.x[k] - step) k--;
        const name = runs.length > 1 ? runs.filter((r) => curveOf(r, figure))[i].title + "  " : "";
        const range = c.low[k] < c.high[k] ? `  (${format(c.low[k])} to ${format(c.high[k])})` : "";
        return `${name}step ${c.x[k].toLocaleString("en")}  ${format(c.mean[k])}${range}`;
      });
      tip.textContent = lines.join("\n");
      plot.append(tip);
      const left = 58 /* of labels */, width = svg.getBoundingClientRect().width;
      tip.style.left = Math.max(0, Math.min(left + f * width + 10, left + width - tip.offsetWidth)) + "px";
      if (start) {
        chosen.setAttribute("x", W * Math.min(start[0], f));
        chosen.setAttribute("width", W * Math.abs(start[0] - f));
        chosen.setAttribute("height", H);
        svg.append(chosen);
      }
    });
    svg.addEventListener("pointerleave", () => { if (!start) clear(); });
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") return;
      start = stepAt(event);
      svg.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    svg.addEventListener("pointerup", (event) => {
      if (!start) return;
      const end = stepAt(event), range = [start[1], end[1]].sort((a, b) => a - b).map(Math.round);
      const wide = Math.abs(end[0] - start[0]) > 0.01 && range[1] > range[0];
      start = null;
      chosen.remove();
      if (wide) setZoom(range);
    });
    svg.addEventListener("pointercancel", () => { start = null; chosen.remove(); clear(); });
    svg.addEventListener("dblclick", () => setZoom(null));
  });

  const smoothing = document.getElementById("smoothing");
  if (smoothing) {
    const long = charts.some((f) => curvesOf(f).some((c) => c.x.length >= 60));
    smoothing.value = long ? 0.9 : 0;
    smoothing.addEventListener("input", () => { part = +smoothing.value; frame(); });
    smoothing.closest(".controls").hidden = false;
    reset.addEventListener("click", () => setZoom(null));
  }
})();
