// Roofline: both axes logarithmic, roofs as measured, whole steps large, kernels small, estimates hollow.
drawings["roofline"] = (data, theme, width = 900) => {
  const slope = data.roofs.bytes_per_second, levels = Object.entries(data.roofs.levels);
  const highest = Math.max(...levels.map(([, rate]) => rate), -Infinity);
  const ridge = slope && levels.length ? [highest / slope] : [];
  const x = decades([...data.points.map((point) => point.x), ...ridge]);
  const y = decades([...data.points.map((point) => point.y), ...levels.map(([, rate]) => rate)]);
  const steps = data.points.filter((point) => !point.kernel);
  const log = (name, range, label, nameGap) => ({ ...valueAxis(theme, name, { nameGap }), type: "log", ...range, axisLabel: { color: theme.faint, formatter: label, hideOverlap: true } });
  return {
    height: width < 600 ? 400 : 460,
    grid: { left: 30, right: 20, top: 44, bottom: 36, containLabel: true },
    legend: methodLegend(theme, steps),
    tooltip: tooltipOf(theme, ({ data: item }) => item.tip ?? ""),
    xAxis: log("arithmetic intensity (FLOP / DRAM byte)", x, roundLabel, 26),
    yAxis: log("FLOP / s", y, (rate) => format.decimal(rate, "").replace(/\.0+ /, " "), 44),
    series: [
      ...(slope ? [memoryRoof(slope, highest, x, y, theme)] : []),
      ...levels.map(([name, rate]) => computeRoof(name, rate, { solid: rate === highest, start: slope ? Math.max(rate / slope, x.min) : x.min, end: x.max }, theme)),
      ...[...new Set(steps.map((point) => point.method))].map((method) => rooflinePoints(data.points.filter((point) => point.method === method), theme)),
    ],
  };
};

// Whole powers of ten: an axis is read by them.
const decades = (values) => {
  const power = (round, value) => 10 ** round(Math.log10(value));
  return { min: power(Math.floor, Math.min(...values) / 1.5), max: power(Math.ceil, Math.max(...values) * 1.5) };
};

const roofLook = (theme, type = "solid") => ({ type: "line", silent: true, symbol: "none", tooltip: { show: false }, color: theme.faint, lineStyle: { color: theme.faint, width: 1.5, type } });

// What memory lets through, up to where computing is the limit.
function memoryRoof(slope, highest, x, y, theme) {
  const start = Math.max(x.min, y.min / slope), end = Math.min(x.max, highest > 0 ? highest / slope : Infinity, y.max / slope);
  return {
    ...roofLook(theme),
    data: [[start, slope * start], [end, slope * end]],
    markPoint: {
      silent: true,
      symbol: "circle",
      symbolSize: 0.01,
      data: [{ coord: [Math.sqrt(start * end), slope * Math.sqrt(start * end)] }],
      label: { show: true, position: "left", offset: [-6, -6], color: theme.faint, fontSize: 11, formatter: `DRAM ${format.rate(slope, "B")}` },
    },
  };
}

const computeRoof = (name, rate, { solid, start, end }, theme) => ({
  ...roofLook(theme, solid ? "solid" : "dashed"),
  data: [[start, rate], [end, rate]],
  endLabel: { show: true, align: "right", verticalAlign: "bottom", offset: [-6, -4], color: theme.faint, fontSize: 11, formatter: `${name} ${format.rate(rate, "FLOP")}` },
});

function rooflinePoints(points, theme) {
  const colour = onTheme(points[0].colour, theme);
  return {
    type: "scatter",
    name: points[0].method,
    symbol: SYMBOLS[points[0].marker],
    color: colour,
    labelLayout: { hideOverlap: true },
    data: points.map((point) => ({
      value: [point.x, point.y],
      tip: rooflineTip(point),
      symbolSize: point.kernel ? 6 : 14,
      itemStyle: { color: point.hollow ? theme.panel : colour, borderColor: colour, borderWidth: point.hollow ? 2 : 0, opacity: point.kernel ? 0.7 : 1 },
      label: { show: !point.kernel, position: "right", color: theme.ink, fontSize: 12, formatter: shorten(point.name, 24) + (point.estimated ? " ≈ estimate" : "") },
    })),
  };
}

function rooflineTip(point) {
  const mark = point.hollow ? "≈" : "";
  const what = point.kernel ? `${escapeText(point.name)}</b><br>a kernel of ${escapeText(point.method)}` : `${escapeText(point.name)}</b>, the whole step`;
  const source = point.estimated ? "<br>≈ estimate: neither bytes nor operations were measured" : point.hollow ? "<br>≈: operations are an estimate, bytes were measured" : "";
  return `<b>${what}<br>${mark}${format.rate(point.y, "FLOP")} at ${mark}${+point.x.toPrecision(3)} FLOP a byte${source}`;
}
