// Memory against time: a point a size, a line a method, the better corner marked.
drawings["tradeoff"] = (data, theme, width = 900) => {
  const points = data.lines.flatMap((line) => line.points);
  const [unit, unitName] = byteUnit(Math.max(...points.map((point) => point.peak_bytes)));
  const place = data.relative
    ? (point) => [point.time_ratio, point.memory_ratio]
    : (point) => [point.median_ms, point.peak_bytes / unit];
  const places = [...points.map(place), ...(data.relative ? [[1, 1]] : [])];
  const x = around(places.map(([time]) => time)), y = around(places.map(([, memory]) => memory));
  const label = (axis) => ({ ...axisLook(theme).axisLabel, formatter: axis });
  return {
    height: width < 600 ? 380 : 420,
    grid: { left: 26, right: 24, top: 44, bottom: 34, containLabel: true },
    legend: methodLegend(theme, [...(data.standard ? [data.standard] : []), ...data.lines]),
    tooltip: tooltipOf(theme, ({ data: item }) => item.tip),
    xAxis: valueAxis(theme, data.relative ? "time of a step (× standard)" : "time of a step (ms)", { ...x, axisLabel: label(roundLabel) }),
    yAxis: valueAxis(theme, data.relative ? "peak memory (× standard)" : `peak memory (${unitName})`, { ...y, nameGap: 40, axisLabel: label(roundLabel) }),
    series: [
      betterCorner(data, theme, x.min, y.min),
      ...(data.standard ? [standardPoint(data.standard, theme)] : []),
      ...data.lines.map((line) => tradeoffLine(line, theme, place)),
    ],
  };
};

function tradeoffLine(line, theme, place) {
  const colour = onTheme(line.colour, theme);
  return {
    type: "line",
    name: line.method,
    symbol: SYMBOLS[line.marker],
    symbolSize: 12,
    color: colour,
    lineStyle: { width: 1, opacity: 0.45 },
    label: { show: true, position: "right", color: theme.faint, fontSize: 11, formatter: ({ data: item }) => item.short },
    labelLayout: { hideOverlap: true },
    data: line.points.map((point) => ({ value: place(point), short: point.short, tip: tradeoffTip(line.method, point) })),
  };
}

function tradeoffTip(method, point) {
  const spread = point.spread_ms ? `, 10th to 90th percentile ${point.spread_ms.map(format.ms).join(" to ")}` : "";
  const doubt = point.steady ? "" : "<br>Step times varied too much for a verdict on time.";
  return `<b>${escapeText(method)}</b>, ${escapeText(point.size)}`
    + `<br>time ${format.ms(point.median_ms)} (${format.ratio(point.time_ratio)})${spread}`
    + `<br>peak memory ${format.bytes(point.peak_bytes)} (${format.ratio(point.memory_ratio)})${doubt}`;
}

function standardPoint(standard, theme) {
  const colour = onTheme(standard.colour, theme);
  return {
    type: "scatter",
    name: standard.method,
    symbol: SYMBOLS[standard.marker],
    symbolSize: 12,
    color: colour,
    data: [{ value: [1, 1], tip: `<b>${escapeText(standard.method)}</b> at every size: what the others are multiples of` }],
    markLine: { silent: true, symbol: "none", label: { show: false }, lineStyle: { color: theme.faint, type: "dashed", width: 1 }, data: [{ xAxis: 1 }, { yAxis: 1 }] },
  };
}

// Words in the corner where less of both is; tinted where that is less than standard's.
function betterCorner(data, theme, left, bottom) {
  const area = { silent: true, itemStyle: { color: theme.accent, opacity: 0.07 }, data: [[{ coord: [left, bottom] }, { coord: [1, 1] }]] };
  return {
    type: "scatter",
    silent: true,
    symbolSize: 0.01,
    tooltip: { show: false },
    data: [[left, bottom]],
    label: { show: true, position: "right", offset: [4, -12], color: theme.accent, fontSize: 12, formatter: "↙ better" },
    ...(data.relative ? { markArea: area } : {}),
  };
}
