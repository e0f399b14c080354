// Roofline: both axes logarithmic, roofs as measured, whole steps large, kernels small, estimates hollow.
drawings["roofline"] = (data, theme) => {
  const slope = data.roofs.bytes_per_second, levels = Object.entries(data.roofs.levels);
  const highest = Math.max(...levels.map(([, rate]) => rate), -Infinity);
  const ridge = slope && levels.length ? [highest / slope] : [];
  const x = decades([...data.points.map((point) => point.x), ...ridge]);
  const y = decades([...data.points.map((point) => point.y), ...levels.map(([, rate]) => rate)]);
  const steps = data.points.filter((point) => !point.kernel);
  const top = methodLegendHeight(theme, steps) + 26;
  const plot = [theme.width - 80, drawings["roofline"].height(data, theme) - top - 60];
  return {
    grid: { left: 8, right: 20, top, bottom: 36, containLabel: true },
    legend: methodLegend(theme, steps),
    tooltip: tooltipOf(theme, ({ data: item }) => item.tip ?? ""),
    xAxis: { ...valueAxis(theme, "arithmetic intensity (FLOP / DRAM byte)", x), type: "log" },
    yAxis: { ...uprightAxis(theme, "FLOP / s", { ...y, axisLabel: { formatter: (rate) => format.decimal(rate, "").replace(/\.0+ /, " ") } }), type: "log" },
    series: [
      ...(slope ? [memoryRoof(slope, highest, x, y, theme, plot)] : []),
      ...levels.map(([name, rate]) => computeRoof(name, rate, { solid: rate === highest, start: slope ? Math.max(rate / slope, x.min) : x.min, end: x.max }, theme)),
      ...rooflineSeries(data.points, theme, x, y, plot, slope ? memoryRoofEnds(slope, highest, x, y) : null),
    ],
  };
};

drawings["roofline"].height = (data, theme) => methodLegendHeight(theme, data.points.filter((point) => !point.kernel)) + (isNarrow(theme) ? 380 : 430);

// A series a method: its step with its name where that covers nothing, and its kernels.
function rooflineSeries(points, theme, x, y, [width, height], roof) {
  const logarithms = (range) => ({ min: Math.log10(range.min), max: Math.log10(range.max) });
  const toPixel = inPixels(logarithms(x), logarithms(y), width, height);
  const steps = points.filter((point) => !point.kernel);
  const pixelOf = (point) => toPixel([Math.log10(point.x), Math.log10(point.y)]);
  const positions = labelPositions(steps.map(pixelOf), steps.map(rooflineName), { size: 16, width, fontSize: 12, taken: roof ? alongRoof(...roof.map(pixelOf)) : [] });
  const positionOf = new Map(steps.map((point, index) => [point, positions[index]]));
  return methodsOf(steps).map(({ method }) => rooflinePoints(points.filter((point) => point.method === method), theme, positionOf));
}

const rooflineName = (point) => shorten(point.name, 24) + (point.estimated ? " ≈ estimate" : "");

// Whole powers of ten: an axis is read by them.
const decades = (values) => {
  const power = (round, value) => 10 ** round(Math.log10(value));
  return { min: power(Math.floor, Math.min(...values) / 1.5), max: power(Math.ceil, Math.max(...values) * 1.5) };
};

// Boxes along a roof, and above it, where its name is: pixels.
const alongRoof = (start, end, count = 40) => Array.from({ length: count + 1 }, (_, place) => {
  const [x, y] = [0, 1].map((axis) => start[axis] + (end[axis] - start[axis]) * place / count);
  return [x - 16, y - 16, x + 4, y + 4];
});

const roofLook = (theme, type = "solid") => ({ type: "line", silent: true, symbol: "none", tooltip: { show: false }, color: theme.faint, lineStyle: { color: theme.faint, width: 1.5, type } });

// What memory lets through, up to where computing is the limit.
function memoryRoofEnds(slope, highest, x, y) {
  const start = Math.max(x.min, y.min / slope), end = Math.min(x.max, highest > 0 ? highest / slope : Infinity, y.max / slope);
  return [start, end].map((intensity) => ({ x: intensity, y: slope * intensity }));
}

function memoryRoof(slope, highest, x, y, theme, [width, height]) {
  const [start, end] = memoryRoofEnds(slope, highest, x, y);
  const place = Math.sqrt(start.x * end.x);
  const rise = height / Math.log10(y.max / y.min), run = width / Math.log10(x.max / x.min); // pixels of a power of ten
  return {
    ...roofLook(theme),
    data: [start, end].map((point) => [point.x, point.y]),
    markPoint: {
      silent: true,
      symbol: "circle",
      symbolSize: 0.01,
      data: [{ coord: [place, slope * place] }],
      label: { show: true, position: "inside", rotate: Math.atan2(rise, run) * 180 / Math.PI, offset: [0, -9], color: theme.faint, fontSize: 11, formatter: `DRAM ${format.rate(slope, "B")}` },
    },
  };
}

const computeRoof = (name, rate, { solid, start, end }, theme) => ({
  ...roofLook(theme, solid ? "solid" : "dashed"),
  data: [[start, rate], [end, rate]],
  endLabel: { show: true, align: "right", verticalAlign: "bottom", offset: [-6, -4], color: theme.faint, fontSize: 11, formatter: `${name} ${format.rate(rate, "FLOP")}` },
});

function rooflinePoints(points, theme, positionOf) {
  const colour = onTheme(points[0].colour, theme);
  return {
    type: "scatter",
    name: points[0].method,
    symbol: SYMBOLS[points[0].marker],
    color: colour,
    data: points.map((point) => ({
      value: [point.x, point.y],
      tip: rooflineTip(point),
      symbolSize: point.kernel ? 6 : 14,
      itemStyle: { color: point.hollow ? theme.panel : colour, borderColor: colour, borderWidth: point.hollow ? 2 : 0, opacity: point.kernel ? 0.7 : 1 },
      label: { show: positionOf.get(point) != null, position: positionOf.get(point) ?? "right", color: theme.ink, fontSize: 12, formatter: rooflineName(point) },
    })),
  };
}

function rooflineTip(point) {
  const mark = point.hollow ? "≈" : "";
  const what = point.kernel ? `${escapeText(point.name)}</b><br>a kernel of ${escapeText(point.method)}` : `${escapeText(point.name)}</b>, the whole step`;
  const source = point.estimated ? "<br>≈ estimate: neither bytes nor operations were measured" : point.hollow ? "<br>≈: operations are an estimate, bytes were measured" : "";
  return `<b>${what}<br>${mark}${format.rate(point.y, "FLOP")} at ${mark}${+point.x.toPrecision(3)} FLOP a byte${source}`;
}
