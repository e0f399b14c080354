// A chart on the page: its drawing at the chosen size, its keys, its buttons, and its figures as a table.

// Axes, legends and tooltips look the same in every drawing, and right in both themes.
function echartsTheme(theme) {
  const line = { lineStyle: { color: theme.rule } };
  const axis = {
    axisLine: line, axisTick: line, splitLine: line, minorSplitLine: line,
    axisLabel: { color: theme.faint }, nameTextStyle: { color: theme.faint },
  };
  const numbers = { ...axis, axisLabel: { ...axis.axisLabel, hideOverlap: true } };
  return {
    textStyle: { color: theme.ink, fontFamily: "system-ui, sans-serif" },
    categoryAxis: axis, ...Object.fromEntries(["valueAxis", "logAxis", "timeAxis"].map((name) => [name, numbers])),
    legend: { textStyle: { color: theme.ink }, pageTextStyle: { color: theme.faint }, pageIconColor: theme.accent, pageIconInactiveColor: theme.rule },
    tooltip: {
      confine: true, transitionDuration: 0, className: "tip", backgroundColor: theme.paper, borderColor: theme.rule, borderWidth: 1,
      textStyle: { color: theme.ink, fontSize: 13 }, axisPointer: { lineStyle: { color: theme.faint }, crossStyle: { color: theme.faint } },
    },
    dataZoom: { textStyle: { color: theme.faint }, borderColor: theme.rule, handleStyle: { color: theme.panel, borderColor: theme.faint } },
  };
}

// A view without a size or a setting spans them all.
const isAt = (view, { setting, size }) => (!view.setting || view.setting === setting) && (!view.size || view.size === size);

const placeOf = ({ setting, size }) => [setting, size].filter(Boolean).join(": ");

class Drawn {
  constructor(chart) {
    this.chart = chart;
    this.figure = document.getElementById(chart.key);
    this.drawing = this.figure.querySelector(".drawing");
    this.title = this.figure.querySelector("h2");
    this.says = this.figure.querySelector(".says");
    this.how = this.figure.querySelector(".how");
    this.data = this.figure.querySelector("details.data");
    this.near = false; // drawn when it comes near the window, so that a long page opens at once
    this.stale = true;
    for (const button of this.figure.querySelectorAll("[data-save]"))
      button.addEventListener("click", () => this.save(button.dataset.save));
    for (const button of this.figure.querySelectorAll("[data-zoom]")) {
      button.hidden = !drawings[chart.kind].zooms;
      button.addEventListener("click", () => this.zoom(Number(button.dataset.zoom)));
    }
    this.data.addEventListener("toggle", () => this.fillTable());
    this.drawing.addEventListener("keydown", (event) => this.press(event));
    this.drawing.addEventListener("blur", () => this.point(null));
    // ECharts keeps a wheel over a drawing that zooms from the page, even where it zooms with Ctrl only.
    this.drawing.addEventListener("wheel", (event) => { if (!event.ctrlKey) event.stopPropagation(); }, { capture: true, passive: true });
  }

  show(choice) {
    this.view = this.chart.views.find((view) => isAt(view, choice));
    this.title.textContent = this.view?.title || this.chart.title;
    this.how.textContent = this.view?.how || this.chart.how;
    this.says.textContent = this.view ? this.view.says : `Not measured at ${choice.size}; there are figures at ${this.elsewhere(choice)}.`;
    this.drawing.setAttribute("aria-label", this.says.textContent);
    this.drawing.hidden = this.data.hidden = !this.view;
    for (const button of this.figure.querySelectorAll("button")) button.disabled = !this.view;
    this.fillTable();
    this.reserve();
    this.redraw();
  }

  // Its height before it is drawn: what is below stays where it is, and a link leads to where it says.
  reserve() {
    const { height } = drawings[this.chart.kind];
    this.attempt(() => { this.drawing.style.height = height ? `${height(this.view.data, this.theme)}px` : ""; });
  }

  // Whether what is drawn is not yet what is chosen: for who hears the page too.
  get stale() {
    return this.drawing.ariaBusy === "true";
  }

  set stale(stale) {
    this.drawing.ariaBusy = String(stale);
  }

  get theme() {
    return { ...currentTheme(), width: this.drawing.clientWidth };
  }

  // Where this chart has figures: the first sizes, those of the chosen setting before others, and how many more.
  elsewhere({ setting }, most = 3) {
    const [here, there] = [true, false].map((same) => this.chart.views.filter((view) => (view.setting === setting) === same));
    const sizes = [...here.map((view) => view.size), ...there.map(placeOf)];
    return sizes.slice(0, most).join("; ") + (sizes.length > most ? `; and ${sizes.length - most} more` : "");
  }

  redraw() {
    this.stale = true;
    if (this.near) this.draw();
  }

  draw() {
    if (!this.stale || !this.view) return;
    this.stale = false;
    this.attempt(() => this.drawNow());
  }

  // One drawing that fails leaves the others, and its own figures, where they are.
  attempt(work) {
    if (!this.view) return;
    try {
      work();
    } catch (error) {
      console.error(error);
      this.says.textContent = `${this.view.says} (It could not be drawn: ${error.message}. The figures are under Data.)`;
    }
  }

  drawNow() {
    const { theme } = this;
    this.instance?.dispose();
    this.instance = echarts.init(this.drawing, echartsTheme(theme), { renderer: "svg" });
    this.instance.setOption({ animation: false, ...drawings[this.chart.kind](this.view.data, theme) });
    this.drawing.setAttribute("aria-label", this.view.says);
    this.drawing.setAttribute("role", "application");
    this.place = null;
  }

  resize() {
    this.reserve();
    if (!this.instance || this.instance.getWidth() === this.drawing.clientWidth) return;
    this.redraw(); // a drawing may be another one at another width
  }

  // Keys: through the points of a series, from series to series, nearer and farther.
  press(event) {
    if (!this.instance || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], PageDown: [0, 10], PageUp: [0, -10], Home: [0, -Infinity], End: [0, Infinity] };
    const zooms = { "+": 0.5, "=": 0.5, "-": 2, "0": 0 };
    if (event.key in moves) this.point(this.next(...moves[event.key]));
    else if (event.key in zooms && drawings[this.chart.kind].zooms) this.zoom(zooms[event.key]);
    else if (event.key === "Escape") this.point(null);
    else return;
    event.preventDefault();
  }

  next(seriesStep, pointStep) {
    const lengths = this.instance.getOption().series.map((series, index) => this.instance.getModel().getSeriesByIndex(index)?.getData().count() ?? 0);
    const silent = this.instance.getOption().series.map((series) => series.silent);
    const speaking = silent.every(Boolean) ? () => true : (index) => !silent[index]; // tooltips may be the axis's alone
    const filled = lengths.flatMap((length, index) => length && speaking(index) ? [index] : []);
    if (!filled.length) return null;
    if (!this.place) return { seriesIndex: filled[0], dataIndex: 0 };
    const clamp = (value, last) => Math.min(Math.max(value, 0), last);
    const seriesIndex = filled[clamp(filled.indexOf(this.place.seriesIndex) + seriesStep, filled.length - 1)];
    return { seriesIndex, dataIndex: clamp(this.place.dataIndex + pointStep, lengths[seriesIndex] - 1) };
  }

  point(place) {
    if (!this.instance) return;
    if (this.place) this.instance.dispatchAction({ type: "downplay", ...this.place });
    this.place = place;
    if (!place) return this.instance.dispatchAction({ type: "hideTip" });
    this.instance.dispatchAction({ type: "highlight", ...place });
    this.instance.dispatchAction({ type: "showTip", ...place });
    announce(this.drawing.querySelector(".tip")?.innerText ?? "");
  }

  // 0: all of it.
  zoom(factor) {
    const [{ start, end }] = this.instance.getOption().dataZoom;
    const middle = (start + end) / 2, half = factor ? Math.min(50, (end - start) * factor / 2) : 50;
    const from = Math.min(Math.max(middle - half, 0), 100 - 2 * half);
    this.instance.dispatchAction({ type: "dataZoom", start: from, end: from + 2 * half });
  }

  get name() {
    return [this.chart.key, slug(`${this.view.setting ?? ""} ${this.view.size}`)].filter(Boolean).join("-");
  }

  async save(kind) {
    if (kind === "csv") return download(`${this.name}.csv`, toCsv(this.view.table), "text/csv");
    this.draw();
    const where = placeOf(this.view);
    const svg = standaloneSvg(this.drawing, this.chart.title, where, currentTheme());
    if (kind === "svg") download(`${this.name}.svg`, svgText(svg), "image/svg+xml");
    else download(`${this.name}.png`, await toPng(svg), "image/png");
  }

  fillTable() {
    if (this.data.open && this.view) this.data.querySelector(".scroll").replaceChildren(htmlTable(this.view.table, this.chart.title));
  }
}

const LONGEST_TABLE = 500; // rows: the CSV has them all

function htmlTable({ columns, rows }, title) {
  const table = document.createElement("table");
  table.createCaption().textContent = rows.length > LONGEST_TABLE ? `${title}: the first ${LONGEST_TABLE} of ${rows.length} rows; the CSV has all` : title;
  const head = table.createTHead().insertRow();
  for (const column of columns) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = column;
    head.append(cell);
  }
  const body = table.createTBody();
  for (const row of rows.slice(0, LONGEST_TABLE)) {
    const line = body.insertRow();
    for (const value of row) {
      const cell = line.insertCell();
      cell.textContent = value ?? MARKS.missing;
      if (typeof value === "number") cell.className = "number";
    }
  }
  return table;
}
