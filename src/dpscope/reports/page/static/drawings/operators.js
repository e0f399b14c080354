// What a method adds to ordinary training, operator by operator: more to the right, less to the left; a panel a method.
drawings["operators"] = (data, theme) => {
  const { columns, height } = operatorsLayout(data, theme);
  const names = Math.min(0.44 * theme.width / columns, 250); // pixels for operators' names
  const places = panelPlaces(data.panels.length, theme, { columns, height, top: 0, left: names, right: 12, above: 24, below: 56 });
  const range = operatorsRange(data.panels, places[0].grid.width);
  return {
    tooltip: tooltipOf(theme, ({ data: item }) => operatorTip(item.bar, item.method)),
    title: data.panels.map((panel, index) => panelTitle(theme, operatorsTitle(panel), places[index])),
    grid: places.map((place) => place.grid),
    xAxis: data.panels.map((_, index) => ({ gridIndex: index, ...valueAxis(theme, "ms more than standard", { ...range, nameGap: 24 }) })),
    yAxis: data.panels.map((panel, index) => operatorNames(panel, index, theme, Math.floor(names / 7))),
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

const operatorsTitle = (panel) => `${panel.method}: ${signed(panel.total_ms)} ms a traced step, ${panel.where}`;

const signed = (ms) => `${ms < 0 ? "−" : "+"}${threeDigits(Math.abs(ms))}`;

// One scale for all methods over `width` pixels, with room for figures: all are to the right of their bars, those of
// bars to the left beside zero.
function operatorsRange(panels, width) {
  const values = panels.flatMap((panel) => panel.bars.map((bar) => bar.ms));
  const low = Math.min(...values, 0), high = Math.max(...values, 0), span = high - low || 1;
  return ticked(low - (low < 0 ? 0.04 * span : 0), high + OPERATOR_FIGURE * span / (width - OPERATOR_FIGURE), width < 240 ? 3 : 4);
}

function operatorNames(panel, index, theme, letters) {
  const label = (place) => {
    const { label: name, phase } = panel.bars[place];
    const after = phase && letters - phase.length > 11 ? ` · ${phase}` : ""; // the tooltip has it in any case
    return shorten(name, letters - after.length) + after;
  };
  return nameAxis(theme, panel.bars.map((_, place) => String(place)), letters, {
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
