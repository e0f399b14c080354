// Memory against time: a point a size, a line a method, the better corner marked. Both axes are logarithmic.
const TRADEOFF = { left: 42, right: 14, below: 50, above: 26 };

drawings["tradeoff"] = (data, theme) => {
  const { top, height, places, texts, x, y, place, unitName, better } = tradeoffLayout(data, theme);
  const unnamed = places.filter((each) => !each).length;
  return {
    grid: { left: TRADEOFF.left, right: TRADEOFF.right, top, height, outerBoundsMode: "none" },
    legend: methodLegend(theme, tradeoffMethods(data)),
    tooltip: tooltipOf(theme, ({ data: item }) => item.tip),
    // No grid: its lines would strike names.
    xAxis: { ...valueAxis(theme, data.relative ? "step time (× standard)" : "step time (ms)", x), ...UNGRIDDED(x) },
    yAxis: { ...uprightAxis(theme, data.relative ? "peak memory (× standard)" : `peak memory (${unitName})`, y), ...UNGRIDDED(y) },
    graphic: [
      { type: "text", silent: true, z: 6, x: TRADEOFF.left + better, y: top + height - 13, style: { text: BETTER, fill: theme.accent, fontSize: 12, fontFamily: "system-ui, sans-serif", verticalAlign: "middle" } },
      ...labelShapes(places, texts, theme, { left: TRADEOFF.left, top, fontSize: TRADEOFF_FONT }),
      ...(unnamed ? [{ type: "text", x: TRADEOFF.left, y: top + height + TRADEOFF.below - 6, silent: true, style: { text: `${unnamed} sizes have no room for a name: see Data`, fill: theme.faint, fontSize: 11, fontFamily: "system-ui, sans-serif" } }] : []),
    ],
    series: [
      ...(data.relative ? [betterCorner(theme, x.min, y.min)] : []),
      ...(data.standard ? [standardPoint(data.standard, theme)] : []),
      ...data.lines.map((line) => tradeoffLine(line, theme, place)),
    ],
  };
};

const TRADEOFF_FONT = 11;
const BETTER = "↙ better", BETTER_WIDTH = textWidth(BETTER, 12);
const UNGRIDDED = ({ axisTick }) => ({ splitLine: { show: false }, axisTick: { ...axisTick, show: true } });
const tradeoffMethods = (data) => [...(data.standard ? [data.standard] : []), ...data.lines];

// Axes, the height at which every size can be named, and where the names are.
const tradeoffLayout = atWidth((data, theme) => {
  const points = data.lines.flatMap((line) => line.points);
  const [unit, unitName] = byteUnit(Math.max(...points.map((point) => point.peak_bytes)));
  const value = data.relative
    ? (point) => [point.time_ratio, point.memory_ratio]
    : (point) => [point.median_ms, point.peak_bytes / unit];
  const place = (point) => value(point).map(Math.log2);
  const values = [...points.map(value), ...(data.relative ? [[1, 1]] : [])];
  const x = closeLog(values.map(([time]) => time)), y = closeLog(values.map(([, memory]) => memory));
  const top = methodLegendHeight(theme, tradeoffMethods(data)) + TRADEOFF.above;
  const width = theme.width - TRADEOFF.left - TRADEOFF.right;
  const texts = points.map((point) => point.short);
  // In the corner, or beyond standard's line where that leaves no room in it.
  const corner = data.relative ? inPixels(x, y, width, 1)([0, 0])[0] : width;
  const better = corner < BETTER_WIDTH + 8 ? corner + 4 : 6;
  const placed = (height, crossing) => {
    const toPixel = inPixels(x, y, width, height);
    const [across, down] = toPixel([0, 0]);
    const own = data.relative ? [[[0, down], [width, down]], [[across, 0], [across, height]]] : [];
    const lines = [...own, ...data.lines.flatMap((line) => pairs(line.points.map((point) => toPixel(place(point)))))];
    const taken = [[better, height - 26, better + BETTER_WIDTH, height], ...(data.relative ? [[across - 8, down - 8, across + 8, down + 8]] : [])];
    return placeLabels(points.map((point) => toPixel(place(point))), texts, { size: 12, width, height, fontSize: TRADEOFF_FONT, taken, lines, crossing });
  };
  return { top, ...fittingHeight(isNarrow(theme) ? 270 : 320, placed), texts, x, y, place, unitName, better };
});

drawings["tradeoff"].height = (data, theme) => {
  const { top, height } = tradeoffLayout(data, theme);
  return top + height + TRADEOFF.below + 14;
};

function tradeoffLine(line, theme, place) {
  return {
    type: "line",
    name: line.method,
    symbol: SYMBOLS[line.marker],
    symbolSize: 12,
    showAllSymbol: true,
    color: onTheme(line.colour, theme),
    lineStyle: { width: 1, opacity: 0.45 },
    data: line.points.map((point) => ({ value: place(point), tip: tradeoffTip(line.method, point) })),
  };
}

function tradeoffTip(method, point) {
  const spread = point.spread_ms ? `, 10th to 90th percentile ${point.spread_ms.map(format.ms).join(" to ")}` : "";
  const mark = point.doubt ? MARKS.doubt : "";
  const doubt = point.doubt ? `<br>${MARKS.doubt} ${escapeText(point.doubt)}` : "";
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

// Tinted where less of both is than standard's.
const betterCorner = (theme, left, bottom) => ({
  type: "scatter",
  silent: true,
  tooltip: { show: false },
  data: [],
  markArea: { silent: true, itemStyle: { color: theme.accent, opacity: 0.08 }, data: [[{ coord: [left, bottom] }, { coord: [0, 0] }]] },
});
