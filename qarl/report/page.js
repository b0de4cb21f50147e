// Draws every figure when it comes into view, in the page's own colours, and anew when the reader's setting changes.
(() => {
  const figures = [...document.querySelectorAll(".figure")];
  const drawn = new Set();

  function look() {
    const style = getComputedStyle(document.documentElement);
    const [ink, faint, rule, box] = ["--ink", "--faint", "--rule", "--box"].map((name) => style.getPropertyValue(name).trim());
    const font = getComputedStyle(document.body).fontFamily;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      "font.color": ink, "font.family": font, "font.size": 12,
      "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": faint, "modebar.activecolor": ink,
      "hoverlabel.bgcolor": box, "hoverlabel.bordercolor": rule, "hoverlabel.font.color": ink,
      "xaxis.gridcolor": rule, "xaxis.linecolor": rule, "yaxis.gridcolor": rule, "yaxis.linecolor": rule,
    };
  }

  function draw(figure) {
    if (drawn.has(figure)) return;
    drawn.add(figure);
    const spec = JSON.parse(figure.querySelector("script").textContent);
    const plot = figure.querySelector(".plot");
    const settings = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]] };
    // On a touch screen a finger on a figure scrolls the page; a pointer selects what to zoom into.
    const dragmode = matchMedia("(hover: hover)").matches ? "zoom" : false;
    Plotly.newPlot(plot, spec.data, { ...spec.layout, dragmode }, settings).then(() => Plotly.relayout(plot, look()));
    addLegend(figure.querySelector(".legend"), plot, spec.data);
  }

  // One button a curve; what belongs to it, band and dots, comes and goes with it.
  function addLegend(legend, plot, traces) {
    const names = [...new Set(traces.map((trace) => trace.legendgroup))];
    if (names.length < 2) return;
    for (const name of names) {
      const places = traces.flatMap((trace, place) => (trace.legendgroup === name ? [place] : []));
      const line = traces[places.at(-1)].line ?? {};
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      const swatch = document.createElement("i");
      swatch.style.borderTop = `3px ${line.dash && line.dash !== "solid" ? "dashed" : "solid"} ${line.color}`;
      button.append(swatch, name);
      button.onclick = () => {
        const shows = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(shows));
        Plotly.restyle(plot, { visible: shows }, places);
      };
      legend.append(button);
    }
  }

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  }, { rootMargin: "600px" });
  figures.forEach((figure) => seen.observe(figure));

  window.addEventListener("beforeprint", () => figures.forEach(draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const figure of drawn) Plotly.relayout(figure.querySelector(".plot"), look());
  });
})();
