// What a method adds to ordinary training, operator by operator: more to the right, less to the left; a panel a method.
drawings["operators"] = (data, theme, width = 900) => {
  const columns = Math.min(width < 860 ? 1 : 2, data.panels.length);
  const across = width / columns;
  const names = Math.min(0.42 * across, 250); // pixels for operators' names
  const rows = Math.max(...data.panels.map((panel) => panel.bars.length));
  const { height, places } = panelPlaces(data.panels.length, { width, columns, height: 70 + 19 * rows, top: 0, left: names, right: 12, above: 26, below: 36 });
  const range = operatorsRange(data.panels);
  return {
    height,
    tooltip: tooltipOf(theme, ({ data: item }) => operatorTip(item.bar, item.method)),
    title: data.panels.map((panel, index) => panelTitle(theme, operatorsTitle(panel), places[index], across)),
    grid: places.map((place) => place.grid),
    xAxis: data.panels.map((_, index) => valueAxis(theme, "ms more than standard", { gridIndex: index, ...range, nameGap: 20, axisLabel: { color: theme.faint, formatter: roundLabel, hideOverlap: true } })),
    yAxis: data.panels.map((panel, index) => operatorNames(panel, index, theme, Math.floor(names / 6.6))),
    series: data.panels.map((panel, index) => operatorBars(panel, index, data, theme)),
  };
};

const operatorsTitle = (panel) => `${panel.method}: ${signed(panel.total_ms)} ms a traced step, ${panel.where}`;

const signed = (ms) => `${ms < 0 ? "−" : "+"}${threeDigits(Math.abs(ms))}`;

// One scale for all methods, with room for figures at both ends.
function operatorsRange(panels) {
  const values = panels.flatMap((panel) => panel.bars.map((bar) => bar.ms));
  const low = Math.min(...values, 0), high = Math.max(...values, 0), span = high - low || 1;
  return onSteps(low < 0 ? low - 0.2 * span : 0, high > 0 ? high + 0.24 * span : 0, 4);
}

function operatorNames(panel, index, theme, letters) {
  const label = (place) => {
    const { label: name, phase } = panel.bars[place];
    const after = phase ? ` · ${phase}` : "";
    return shorten(name, Math.max(letters - after.length, 8)) + after;
  };
  return nameAxis(theme, panel.bars.map((_, place) => String(place)), letters, {
    gridIndex: index,
    axisLine: { show: true, onZero: true, lineStyle: { color: theme.faint } },
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
      label: { show: true, position: bar.ms < 0 ? "left" : "right", color: theme.ink, fontSize: 11, formatter: `${signed(bar.ms)}${note(bar)}` },
    })),
  };
}

function operatorTip(bar, method) {
  const phase = bar.phase ? ` in ${escapeText(bar.phase)}` : "";
  const kind = bar.kind ? ` (${escapeText(bar.kind)})` : "";
  const from = bar.before_ms == null ? "" : `<br>standard ${threeDigits(bar.before_ms)} ms, ${escapeText(method)} ${threeDigits(bar.after_ms)} ms`;
  return `<b>${escapeText(bar.name)}</b>${phase}${kind}<br>${signed(bar.ms)} ms${from}`;
}
