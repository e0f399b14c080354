// Memory against time: a point a size, a line a method, the better corner marked. Both axes are logarithmic.
drawings["tradeoff"] = (data, theme) => {
  const points = data.lines.flatMap((line) => line.points);
  const [unit, unitName] = byteUnit(Math.max(...points.map((point) => point.peak_bytes)));
  const value = data.relative
    ? (point) => [point.time_ratio, point.memory_ratio]
    : (point) => [point.median_ms, point.peak_bytes / unit];
  const place = (point) => value(point).map(Math.log2);
  const values = [...points.map(value), ...(data.relative ? [[1, 1]] : [])];
  const x = closeLog(values.map(([time]) => time)), y = closeLog(values.map(([, memory]) => memory));
  const top = methodLegendHeight(theme, tradeoffMethods(data)) + 26;
  const width = theme.width - 70, height = drawings["tradeoff"].height(data, theme) - top - 60;
  const toPixel = inPixels(x, y, width, height);
  // Standard's own place comes first, so that no label covers it.
  const labels = labelPositions([...(data.relative ? [[0, 0]] : []), ...points.map(place)].map(toPixel), [...(data.relative ? [""] : []), ...points.map((point) => point.short)], { size: 12, width, taken: [[0, height - 26, 70, height]] });
  const labelOf = new Map(points.map((point, index) => [point, labels[index + (data.relative ? 1 : 0)]]));
  return {
    grid: { left: 8, right: 24, top, bottom: 34, containLabel: true },
    legend: methodLegend(theme, tradeoffMethods(data)),
    tooltip: tooltipOf(theme, ({ data: item }) => item.tip),
    xAxis: valueAxis(theme, data.relative ? "time of a step (× standard)" : "time of a step (ms)", x),
    yAxis: uprightAxis(theme, data.relative ? "peak memory (× standard)" : `peak memory (${unitName})`, y),
    series: [
      betterCorner(data, theme, x.min, y.min),
      ...(data.standard ? [standardPoint(data.standard, theme)] : []),
      ...data.lines.map((line) => tradeoffLine(line, theme, place, labelOf)),
    ],
  };
};

const tradeoffMethods = (data) => [...(data.standard ? [data.standard] : []), ...data.lines];

drawings["tradeoff"].height = (data, theme) => methodLegendHeight(theme, tradeoffMethods(data)) + (isNarrow(theme) ? 350 : 400);

function tradeoffLine(line, theme, place, labelOf) {
  return {
    type: "line",
    name: line.method,
    symbol: SYMBOLS[line.marker],
    symbolSize: 12,
    showAllSymbol: true,
    color: onTheme(line.colour, theme),
    lineStyle: { width: 1, opacity: 0.45 },
    data: line.points.map((point) => ({
      value: place(point),
      tip: tradeoffTip(line.method, point),
      label: { show: labelOf.get(point) != null, position: labelOf.get(point) ?? "right", color: theme.faint, fontSize: 11, formatter: point.short },
    })),
  };
}

function tradeoffTip(method, point) {
  const spread = point.spread_ms ? `, 10th to 90th percentile ${point.spread_ms.map(format.ms).join(" to ")}` : "";
  const mark = point.doubt ? "?" : "";
  const doubt = point.doubt ? `<br>? ${escapeText(point.doubt)}` : "";
  return `<b>${escapeText(method)}</b>, ${escapeText(point.size)}`
    + `<br>time ${format.ms(point.median_ms)}${mark} (${format.ratio(point.time_ratio)}${mark})${spread}`
    + `<br>peak memory ${format.bytes(point.peak_bytes)} (${format.ratio(point.memory_ratio)})${doubt}`;
}

// At the logarithm of one.
const standardPoint = (standard, theme) => ({
  type: "scatter",
  name: standard.method,
  symbol: SYMBOLS[standard.marker],
  symbolSize: 12,
  color: onTheme(standard.colour, theme),
  data: [{ value: [0, 0], tip: `<b>${escapeText(standard.method)}</b> at every size: what the others are multiples of` }],
  markLine: { silent: true, symbol: "none", label: { show: false }, lineStyle: { color: theme.faint, type: "dashed", width: 1 }, data: [{ xAxis: 0 }, { yAxis: 0 }] },
});

// Words in the corner where less of both is; tinted where that is less than standard's.
function betterCorner(data, theme, left, bottom) {
  const area = { silent: true, itemStyle: { color: theme.accent, opacity: 0.08 }, data: [[{ coord: [left, bottom] }, { coord: [0, 0] }]] };
  return {
    type: "scatter",
    silent: true,
    symbolSize: 0.01,
    tooltip: { show: false },
    data: [[left, bottom]],
    itemStyle: { opacity: 1 }, // which the words would share
    label: { show: true, position: "right", offset: [4, -12], color: theme.accent, fontSize: 12, formatter: "↙ better" },
    ...(data.relative ? { markArea: area } : {}),
  };
}
