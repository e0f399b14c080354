// Roofline: both axes logarithmic, roofs as measured, whole steps large, kernels small, estimates hollow.
const ROOFLINE = { left: 46, right: 22, below: 46, above: 26, font: 12, key: 16 };

drawings["roofline"] = (data, theme) => {
  const { top, height, width, x, y, places, texts, roofNames, levels, slope, highest } = rooflineLayout(data, theme);
  return {
    grid: { left: ROOFLINE.left, right: ROOFLINE.right, top, height, outerBoundsMode: "none" },
    legend: methodLegend(theme, stepsOf(data)),
    tooltip: tooltipOf(theme, ({ data: item }) => item.tip ?? ""),
    // No grid: its lines would strike names.
    xAxis: { ...valueAxis(theme, "arithmetic intensity (FLOP / DRAM byte)", { ...x, axisTick: { show: true } }), type: "log", splitLine: { show: false } },
    yAxis: { ...uprightAxis(theme, "FLOP / s", { ...y, axisTick: { show: true }, axisLabel: { formatter: (rate) => format.decimal(rate, "").replace(/\.0+ /, " ") } }), type: "log", splitLine: { show: false } },
    graphic: [...roofNames.map(({ text, box }) => ({ type: "text", silent: true, x: ROOFLINE.left + box[0], y: top + (box[1] + box[3]) / 2, style: { text, fill: theme.faint, fontSize: 11, fontFamily: "system-ui, sans-serif", verticalAlign: "middle" } })), ...labelShapes(places, texts, theme, { left: ROOFLINE.left, top, fontSize: ROOFLINE.font, fill: theme.ink }), ...kernelKey(data, theme, top + height + ROOFLINE.below)],
    series: [
      ...(slope ? [memoryRoof(slope, highest, x, y, theme, [width, height])] : []),
      ...levels.map(([, rate]) => computeRoof(rate, { solid: rate === highest, start: slope ? Math.max(rate / slope, x.min) : x.min, end: x.max }, theme)),
      ...methodsOf(stepsOf(data)).map(({ method }) => rooflinePoints(data.points.filter((point) => point.method === method), theme)),
    ],
  };
};

const stepsOf = (data) => data.points.filter((point) => !point.kernel);
const kernelsOf = (data) => data.points.filter((point) => point.kernel);

// Kernels have long names: they are numbered, and named below the plot.
const keyColumns = (theme) => theme.width < 760 ? 1 : 2;
const keyHeight = (data, theme) => ROOFLINE.key * Math.ceil(kernelsOf(data).length / keyColumns(theme));
function kernelKey(data, theme, top) {
  const columns = keyColumns(theme), kernels = kernelsOf(data), lines = Math.ceil(kernels.length / columns), across = theme.width / columns;
  return kernels.map((point, index) => ({
    type: "text", silent: true, x: Math.floor(index / lines) * across + 4, y: top + ROOFLINE.key * (index % lines),
    style: { text: `${index + 1}  ${shortenTo(point.name, across - 40 - textWidth(point.method, 11), 11)} · ${shorten(point.method, 16)}`, fill: theme.faint, fontSize: 11, fontFamily: "system-ui, sans-serif" },
  }));
}

// Axes, roofs, the height at which every point can be named, and where the names are: pixels of the plot.
const rooflineLayout = atWidth((data, theme) => {
  const slope = data.roofs.bytes_per_second, levels = Object.entries(data.roofs.levels);
  const highest = Math.max(...levels.map(([, rate]) => rate), -Infinity);
  const ridge = slope && levels.length ? [highest / slope] : [];
  const x = decades([...data.points.map((point) => point.x), ...ridge]);
  const y = decades([...data.points.map((point) => point.y), ...levels.map(([, rate]) => rate)]);
  const top = methodLegendHeight(theme, stepsOf(data)) + ROOFLINE.above, width = theme.width - ROOFLINE.left - ROOFLINE.right;
  const points = [...stepsOf(data), ...kernelsOf(data)];
  const texts = points.map((point) => point.kernel ? String(kernelsOf(data).indexOf(point) + 1) : rooflineName(point));
  const logarithms = (range) => ({ min: Math.log10(range.min), max: Math.log10(range.max) });
  let roofNames;
  const placed = (height, crossing) => {
    const toPixel = inPixels(logarithms(x), logarithms(y), width, height);
    const pixelOf = (point) => toPixel([Math.log10(point.x), Math.log10(point.y)]);
    const roof = slope ? memoryRoofEnds(slope, highest, x, y).map(pixelOf) : null;
    const flat = levels.map(([, rate]) => [slope ? Math.max(rate / slope, x.min) : x.min, x.max].map((intensity) => pixelOf({ x: intensity, y: rate })));
    roofNames = namesOfRoofs(levels, flat, points.map(pixelOf));
    const taken = [...roofNames.map(({ box }) => box), ...(roof ? aboveRoof(...roof, slope) : [])];
    return placeLabels(points.map(pixelOf), texts, { size: 14, width, height, fontSize: ROOFLINE.font, taken, lines: [...flat, ...(roof ? [roof] : [])], crossing });
  };
  const fitting = fittingHeight(isNarrow(theme) ? 300 : 340, placed); // and the names of roofs at that height
  return { top, ...fitting, roofNames, width, x, y, texts, levels, slope, highest };
});

drawings["roofline"].height = (data, theme) => {
  const { top, height } = rooflineLayout(data, theme);
  return top + height + ROOFLINE.below + keyHeight(data, theme);
};

const rooflineName = (point) => shorten(point.name, 24) + (point.estimated ? ` ${MARKS.estimate} estimate` : "");

// Whole powers of ten: an axis is read by them.
const decades = (values) => {
  const power = (round, value) => 10 ** round(Math.log10(value));
  return { min: power(Math.floor, Math.min(...values) / 1.5), max: power(Math.ceil, Math.max(...values) * 1.5) };
};

// Boxes along the middle of a roof, where its name is: pixels.
const aboveRoof = (start, end, slope) => {
  const [across, down] = [0, 1].map((axis) => end[axis] - start[axis]), length = Math.hypot(across, down) || 1;
  const half = Math.min(textWidth(`DRAM ${format.rate(slope, "B")}`, 11) / 2 + 6, length / 2);
  return Array.from({ length: 11 }, (_, place) => {
    const along = length / 2 + half * (place / 5 - 1), x = start[0] + across * along / length, y = start[1] + down * along / length;
    return [x - 14, y - 18, x + 4, y + 2];
  });
};

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

const computeRoof = (rate, { solid, start, end }, theme) => ({
  ...roofLook(theme, solid ? "solid" : "dashed"),
  data: [[start, rate], [end, rate]],
});

// The name of each flat roof: above its end, or wherever along and above it no point is. `points` and boxes: pixels.
function namesOfRoofs(levels, roofs, points) {
  const boxes = [];
  for (const [index, [name, rate]] of levels.entries()) {
    const text = `${name} ${format.rate(rate, "FLOP")}`, width = textWidth(text, 11) + 6, [[from, y], [to]] = roofs[index];
    const free = (box) => points.every(([px, py]) => px < box[0] - 9 || px > box[2] + 9 || py < box[1] - 9 || py > box[3] + 9) && boxes.every(({ box: other }) => apart(box, other));
    const places = [4, 20, 36, 52, -20].flatMap((above) => [to - width, (from + to - width) / 2, from].map((left) => [left, y - above - 14, left + width, y - above]));
    boxes.push({ text, box: places.find(free) ?? places[0] });
  }
  return boxes;
}

function rooflinePoints(points, theme) {
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
    })),
  };
}

function rooflineTip(point) {
  const mark = point.hollow ? MARKS.estimate : "";
  const what = point.kernel ? `${escapeText(point.name)}</b><br>a kernel of ${escapeText(point.method)}` : `${escapeText(point.name)}</b>, the whole step`;
  const source = point.estimated ? `<br>${MARKS.estimate} estimate: neither bytes nor operations were measured` : point.hollow ? `<br>${MARKS.estimate}: operations are an estimate, bytes were measured` : "";
  return `<b>${what}<br>${mark}${format.rate(point.y, "FLOP")} at ${mark}${+point.x.toPrecision(3)} FLOP a byte${source}`;
}
