// Time and memory against what varies: a panel for each value of what does not, a line a method, failures at the top.
drawings["scaling"] = (data, theme) => {
  const panels = scalingPanels(data);
  const places = panelPlaces(panels.length, theme, { columns: scalingColumns(panels, theme), height: SCALING_HEIGHT, top: methodLegendHeight(theme, scalingLines(data)) + 6, left: 48 });
  const ranges = panels.map(({ panel, metric }) => scalingRange(metric.shared ? data.panels : [panel], metric));
  return {
    legend: methodLegend(theme, scalingLines(data)),
    tooltip: tooltipOf(theme, (items) => scalingTip(items, data.axis), { trigger: "axis", axisPointer: { lineStyle: { color: theme.faint } } }),
    title: panels.map(({ panel, metric }, index) => panelTitle(theme, [panel.title, metric.title].filter(Boolean).join(": "), places[index])),
    grid: places.map((place) => place.grid),
    xAxis: panels.map(({ panel }, index) => ({ gridIndex: index, ...scalingSizes(panel, data.axis, theme) })),
    yAxis: panels.map((_, index) => ({ gridIndex: index, ...valueAxis(theme, "", ranges[index]) })),
    series: panels.flatMap(({ panel, metric }, index) => [
      ...panel.lines.map((line) => scalingLine(line, metric, index, theme)),
      ...scalingFailures(panel, metric, index, ranges[index].max, theme),
      ...scalingCapacity(metric, index, theme),
    ]),
  };
};

const SCALING_HEIGHT = 236; // pixels of a panel
const scalingLines = (data) => data.panels.flatMap((panel) => panel.lines);
const scalingPoints = (data) => scalingLines(data).flatMap((line) => line.points);
const scalingColumns = (panels, theme) => theme.width < 640 ? 1 : Math.min(2, panels.length);

// A panel for time and one for memory, each only if anything is known of it.
function scalingPanels(data) {
  const metrics = [scalingTime(data), scalingMemory(data)].filter((metric) => scalingPoints(data).some((point) => metric.of(point) != null));
  return data.panels.flatMap((panel) => metrics.map((metric) => ({ panel, metric })));
}

drawings["scaling"].height = (data, theme) => {
  const panels = scalingPanels(data);
  return methodLegendHeight(theme, scalingLines(data)) + 6 + SCALING_HEIGHT * Math.ceil(panels.length / scalingColumns(panels, theme));
};

const scalingTime = (data) => data.relative
  ? { title: "time (× standard)", of: (point) => point.time_ratio, least: 1, shared: true }
  : { title: "step time (ms)", of: (point) => point.median_ms, least: 0 };

function scalingMemory(data) {
  const points = scalingPoints(data);
  const largest = Math.max(...points.map((point) => point.peak_bytes ?? 0));
  // How much there is matters where it is nearly used up, or was.
  const full = data.capacity_bytes && (largest > data.capacity_bytes / 2 || points.some((point) => point.status === "oom"));
  const [unit, name] = byteUnit(full ? data.capacity_bytes : largest);
  const capacity = full ? data.capacity_bytes / unit : null;
  return { title: `peak memory (${name})`, of: (point) => point.peak_bytes == null ? null : point.peak_bytes / unit, least: capacity ?? 0, capacity, name };
}

const scalingRange = (panels, metric) => {
  const points = scalingPoints({ panels });
  const failed = points.some((point) => scalingFailed(point, metric));
  return fromZero([metric.least, ...points.map((point) => metric.of(point) ?? 0)], failed ? 1.35 : 1.1);
};

const scalingFailed = (point, metric) => metric.of(point) == null && point.status !== "ok";

// Sizes are far apart: each twice as large is one step to the right, and only sizes that were tried are named.
function scalingSizes(panel, name, theme) {
  const sizes = [...new Set(panel.lines.flatMap((line) => line.points.map((point) => point.x)))].map(Math.log2);
  const low = Math.min(...sizes), high = Math.max(...sizes), room = 0.12 * (high - low);
  return valueAxis(theme, name, {
    min: low - room,
    max: high + room,
    splitLine: { show: false },
    axisTick: { show: true, customValues: sizes },
    axisLabel: { customValues: sizes, formatter: (exponent) => String(Math.round(2 ** exponent)) },
  });
}

function scalingLine(line, metric, index, theme) {
  return {
    type: "line",
    name: line.method,
    xAxisIndex: index,
    yAxisIndex: index,
    symbol: SYMBOLS[line.marker],
    symbolSize: 9,
    color: onTheme(line.colour, theme),
    lineStyle: { width: 1.5 },
    data: line.points.map((point) => ({ value: [Math.log2(point.x), metric.of(point)], point, method: line.method })),
  };
}

// What has no figure because it failed stands at the top, crossed and named; several of one size below one another.
function scalingFailures(panel, metric, index, top, theme) {
  const below = {}, last = Math.max(...panel.lines.flatMap((line) => line.points.map((point) => point.x)));
  return panel.lines.map((line) => ({
    type: "scatter",
    name: line.method,
    xAxisIndex: index,
    yAxisIndex: index,
    symbol: FAILED_SYMBOL,
    symbolSize: 9,
    color: onTheme(line.colour, theme),
    itemStyle: { opacity: 1 },
    label: { show: true, color: theme.ink, fontSize: 11, formatter: ({ data: item }) => item.point.status },
    data: line.points.filter((point) => scalingFailed(point, metric)).map((point) => {
      below[point.x] = (below[point.x] ?? 0) + 1;
      return { value: [Math.log2(point.x), top], symbolOffset: [0, 14 * below[point.x] - 6], label: { position: point.x === last ? "left" : "right" }, point, method: line.method };
    }),
  }));
}

const scalingCapacity = (metric, index, theme) => metric.capacity == null ? [] : [{
  type: "scatter",
  xAxisIndex: index,
  yAxisIndex: index,
  data: [],
  markLine: {
    silent: true,
    symbol: "none",
    lineStyle: { color: theme.faint, type: "dashed", width: 1 },
    label: { position: "insideStartTop", color: theme.faint, formatter: `all of the GPU: ${threeDigits(metric.capacity)} ${metric.name}` },
    data: [{ yAxis: metric.capacity }],
  },
}];

function scalingTip(items, axis) {
  const seen = new Map(items.filter((item) => item.data?.point).map(({ data, marker }) => [data.method, { ...data, marker }]));
  const lines = [...seen.values()].map(({ method, point, marker }) => `${marker}${escapeText(method)}: ${scalingFigures(point)}`);
  return lines.length ? `<b>${escapeText(axis)} ${[...seen.values()][0].point.x}</b><br>${lines.join("<br>")}` : "";
}

function scalingFigures(point) {
  const ratio = (value) => value == null ? "" : ` (${format.ratio(value)})`;
  const parts = [
    point.median_ms == null ? null : `${format.ms(point.median_ms)}${ratio(point.time_ratio)}${point.mark}`,
    point.peak_bytes == null ? null : `${format.bytes(point.peak_bytes)}${ratio(point.memory_ratio)}`,
    point.status === "ok" ? null : escapeText(point.status),
  ];
  return parts.filter(Boolean).join(", ");
}
