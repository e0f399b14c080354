// What a method adds to ordinary training, operator by operator: more to the right, less to the left; a panel a method.
drawings["operators"] = (data, theme) => {
  const { columns, height } = operatorsLayout(data, theme);
  const names = Math.min(0.46 * theme.width / columns, 290); // pixels for operators' names
  const places = panelPlaces(data.panels.length, theme, { columns, height, top: 0, left: names, right: 12, above: 24, below: 56 });
  const range = operatorsRange(data.panels, places[0].grid.width);
  return {
    tooltip: tooltipOf(theme, ({ data: item }) => operatorTip(item.bar, item.method)),
    title: data.panels.map((panel, index) => panelTitle(theme, operatorsTitle(panel), places[index])),
    grid: places.map((place) => place.grid),
    xAxis: data.panels.map((_, index) => ({ gridIndex: index, ...valueAxis(theme, "ms more than standard", { ...range, nameGap: 24 }) })),
    yAxis: data.panels.map((panel, index) => operatorNames(panel, index, theme, names - 10)),
    series: data.panels.map((panel, index) => operatorBars(panel, index, data, theme)),
  };
};

function operatorsLayout(data, theme) {
  const columns = Math.min(theme.width < 860 ? 1 : 2, data.panels.length);
  const rows = Math.max(...data.panels.map((panel) => panel.bars.length));
  return { columns, height: 84 + 19 * rows, lines: Math.ceil(data.panels.length / columns) };
}

drawings["operators"].height = (data, theme) => {
  const { height, lines } = operatorsLayout(data, theme);
  return height * lines;
};

const OPERATOR_FIGURE = 68; // pixels

const operatorsTitle = ({ method, total_ms, parts }) => parts.length > 1
  ? `${method}: ${signed(total_ms)} ms a traced step (${parts.map(([what, ms]) => `${signed(ms)} ${what}`).join(", ")})`
  : `${method}: ${signed(total_ms)} ms a traced step, ${parts[0][0]}`;

const signed = (ms) => `${ms < 0 ? "−" : "+"}${threeDigits(Math.abs(ms))}`;

// One scale for all methods over `width` pixels, with room for figures: all are to the right of their bars, those of
// bars to the left beside zero.
function operatorsRange(panels, width) {
  const values = panels.flatMap((panel) => panel.bars.map((bar) => bar.ms));
  const low = Math.min(...values, 0), high = Math.max(...values, 0), span = high - low || 1;
  return ticked(low - (low < 0 ? 0.04 * span : 0), high + OPERATOR_FIGURE * span / (width - OPERATOR_FIGURE), width < 240 ? 3 : 4);
}

function operatorNames(panel, index, theme, room) {
  const label = (place) => {
    const { label: name, phase } = panel.bars[place];
    const after = phase && room - textWidth(phase, 11) > 90 ? ` · ${phase}` : ""; // the tooltip has it in any case
    return shortenTo(name, room - textWidth(after, 11), 11) + after;
  };
  return nameAxis(theme, panel.bars.map((_, place) => String(place)), 0, {
    gridIndex: index,
    axisLine: { onZero: true, lineStyle: { color: theme.faint } },
    axisLabel: { color: theme.ink, fontSize: 11, interval: 0, formatter: (place) => label(Number(place)) },
  });
}

function operatorBars(panel, index, data, theme) {
  const note = (bar) => bar.kind && bar.kind !== "grew" && bar.kind !== "shrank" ? ` ${bar.kind.split(" ")[0]}` : "";
  return {
    type: "bar",
    xAxisIndex: index,
    yAxisIndex: index,
    barMaxWidth: 13,
    data: panel.bars.map((bar) => ({
      value: bar.ms,
      bar,
      method: panel.method,
      itemStyle: { color: bar.ms > 0 ? data.grew : data.shrank },
      label: { show: true, position: "right", color: theme.ink, fontSize: 11, formatter: `${signed(bar.ms)}${note(bar)}` },
    })),
  };
}

function operatorTip(bar, method) {
  const phase = bar.phase ? ` in ${escapeText(bar.phase)}` : "";
  const kind = bar.kind ? ` (${escapeText(bar.kind)})` : "";
  const from = bar.before_ms == null ? "" : `<br>standard ${threeDigits(bar.before_ms)} ms, ${escapeText(method)} ${threeDigits(bar.after_ms)} ms`;
  return `<b>${escapeText(bar.name)}</b>${phase}${kind}<br>${signed(bar.ms)} ms${from}`;
}
