// What drawings of methods share: symbols, text that fits, axes with round numbers, panels side by side.

// The markers of palette.py as ECharts draws them.
const SYMBOLS = {
  "o": "circle",
  "s": "rect",
  "D": "diamond",
  "^": "triangle",
  "v": "path://M0,0L10,0L5,9Z",
  "P": "path://M3,0H7V3H10V7H7V10H3V7H0V3H3Z",
  "*": "path://M5,0L6.2,3.6H10L7,5.9L8.1,9.6L5,7.3L1.9,9.6L3,5.9L0,3.6H3.8Z",
  "X": "path://M0,2L2,0L5,3L8,0L10,2L7,5L10,8L8,10L5,7L2,10L0,8L3,5Z",
  "<": "path://M9,0L9,10L0,5Z",
  ">": "path://M0,0L9,5L0,10Z",
  "p": "path://M5,0L10,3.8L8.1,10H1.9L0,3.8Z",
  "h": "path://M5,0L9.4,2.5V7.5L5,10L0.6,7.5V2.5Z",
};
const FAILED_SYMBOL = SYMBOLS.X;

const isNarrow = (theme) => theme.width < 600;

// The unit an axis is read in: the largest of which there are two.
const byteUnit = (largest) => [[GIB, "GiB"], [MIB, "MiB"], [KIB, "KiB"]].find(([size]) => largest >= 2 * size) ?? [1, "B"];

const tooltipOf = (theme, formatter, more = {}) => ({
  ...tooltipOn(theme, theme.width),
  trigger: "item",
  extraCssText: "max-width: min(30rem, 90vw); white-space: normal; overflow-wrap: anywhere;",
  formatter,
  ...more,
});

// One entry a method, whatever the number of its lines and panels.
const methodsOf = (lines) => lines.filter((line, place) => lines.findIndex(({ method }) => method === line.method) === place);

const methodLegend = (theme, lines) => ({
  ...legendOf(methodsOf(lines).map((line) => ({
    name: line.method,
    icon: SYMBOLS[line.marker],
    itemStyle: { color: onTheme(line.colour, theme), borderWidth: 0, opacity: 1 },
  })), theme),
  itemWidth: 12,
  itemHeight: 12,
});

const methodLegendHeight = (theme, lines) => legendHeight(methodsOf(lines).map((line) => line.method), theme.width);

const valueAxis = (theme, name, more = {}) => ({
  type: "value",
  name,
  nameLocation: "middle",
  nameGap: 26,
  nameTextStyle: { color: theme.faint },
  axisLine: { show: true, onZero: false, lineStyle: { color: theme.faint } },
  splitLine: { lineStyle: { color: theme.rule } },
  ...more,
  axisTick: { show: false, ...more.axisTick },
  axisLabel: { color: theme.faint, hideOverlap: true, formatter: roundLabel, ...more.axisLabel },
});

// The name of an upright axis lies above it, where it is read without turning the head and takes no width.
const uprightAxis = (theme, name, more = {}) => {
  const axis = valueAxis(theme, name, { ...more, nameLocation: "end", nameGap: 12 });
  return { ...axis, nameTextStyle: { color: theme.faint, align: "left" } };
};

// Names down the left side, cut in the middle where there is no room.
const nameAxis = (theme, names, letters, more = {}) => ({
  type: "category",
  inverse: true,
  data: names,
  axisTick: { show: false },
  axisLine: { lineStyle: { color: theme.faint } },
  axisLabel: { color: theme.ink, interval: 0, formatter: (name) => shorten(name, letters) },
  ...more,
});

// Axis labels without the crumbs of binary fractions, and with a minus as wide as a plus.
const roundLabel = (value) => String(+value.toPrecision(6)).replace("-", "−");

// A step of 1, 2 or 5 times a power of ten: at most `count` of them in a span.
const roundStep = (span, count) => {
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
};

// An axis that ends where it has to and is labelled at round numbers.
const ticked = (low, high, count = 5) => {
  const step = roundStep(high - low, count), first = Math.ceil(low / step - 1e-9);
  const ticks = Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, place) => (first + place) * step);
  return { min: low, max: high, axisTick: { customValues: ticks }, axisLabel: { customValues: ticks } };
};

// From zero to somewhat above the largest value.
const fromZero = (values, room = 1.1, count = 5) => ticked(0, Math.max(...values) * room || 1, count);

// A logarithmic axis over values of the same order: powers of ten would leave it without labels. It is drawn in powers
// of two, labelled at a few round multiples of powers of ten, and never so close up that noise looks like a difference.
const closeLog = (values) => {
  const low = Math.log2(Math.min(...values)), high = Math.log2(Math.max(...values));
  const room = Math.max(0.12 * (high - low), 0.25), min = low - room, max = high + room;
  const powers = Array.from({ length: 40 }, (_, place) => 10 ** (place - 20));
  const round = (max - min > 6 ? [1, 3] : max - min > 3 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 7]).flatMap((factor) => powers.map((power) => factor * power));
  const ticks = [...round.map(Math.log2), ...(max - min < 1.5 ? [0.8, 0.9, 1.1, 1.2, 1.3].map(Math.log2) : [])].filter((tick) => tick >= min && tick <= max).sort((one, other) => one - other);
  return { min, max, axisTick: { customValues: ticks }, axisLabel: { customValues: ticks, formatter: (power) => roundLabel(+(2 ** power).toPrecision(4)) } };
};

// Where a label for each point stands: beside it, or farther off with a line to it. It covers no other label, no point
// and nothing that is `taken`, no line of `lines` strikes it, and it is inside the plot. null: there is no such place.
// `points`: pixels; `size`: of their symbols; `lines`: pairs of pixels; `crossing`: may a line to a label cross symbols?
const placeLabels = (points, texts, { size, width, height, fontSize = 11, taken = [], lines = [], crossing = false }) => {
  const symbols = points.map(([x, y]) => [x - size / 2 - 1, y - size / 2 - 1, x + size / 2 + 1, y + size / 2 + 1]);
  const once = (order, nearest) => {
    const labels = [...taken], strokes = [...lines], places = points.map(() => null);
    for (const index of order) {
      const half = [textWidth(texts[index], fontSize) / 2 + 3, fontSize / 2 + 3];
      const place = freePlace(points[index], half, size, { width, height, symbols, labels, strokes, crossing, nearest });
      if (!place) continue;
      places[index] = place;
      labels.push(place.box);
      if (place.line) strokes.push(place.line);
    }
    return places;
  };
  const few = points.length <= 24, most = few ? 13 : points.length <= 60 ? 7 : 1; // tries: among many points each takes long
  const placed = (places) => places.filter(Boolean).length;
  let best = points.map(() => null);
  // Labels close to a crowd wall it in: where lines may cross symbols anyway, all labels stand farther off.
  for (const nearest of few && crossing ? [0, 18, 44] : [0]) {
    let order = points.map((_, index) => index);
    for (let tries = most; tries && best.includes(null); tries -= 1) {
      const found = once(order, nearest);
      if (placed(found) > placed(best)) best = found;
      order = [...order.filter((index) => !found[index]), ...order.filter((index) => found[index])]; // what found no place goes first
    }
  }
  return best;
};

// Right, left, above and below, the corners, and then what lies between: points on the sides of a square.
const DIRECTIONS = [
  [1, 0], [-1, 0], [0, -1], [0, 1], [1, -1], [-1, -1], [1, 1], [-1, 1],
  ...[0.5, 0.25, 0.75].flatMap((part) => [[1, -part], [-1, -part], [1, part], [-1, part], [part, -1], [-part, -1], [part, 1], [-part, 1]]),
];
const DISTANCES = [0, 8, 18, 30, 44, 60, 80, 105, 135, 170, 210, 260, 320]; // pixels beyond the symbol

const apart = (one, other) => one[2] <= other[0] || other[2] <= one[0] || one[3] <= other[1] || other[3] <= one[1];

function freePlace([x, y], [halfWidth, halfHeight], size, { width, height, symbols, labels, strokes, crossing, nearest }) {
  const boxes = [...symbols, ...labels], walls = crossing ? labels : boxes;
  for (const distance of DISTANCES.filter((each) => each >= nearest))
    for (const [right, down] of DIRECTIONS) {
      const off = size / 2 + 1 + distance, center = [x + right * (halfWidth + off), y + down * (halfHeight + off)];
      const box = [center[0] - halfWidth, center[1] - halfHeight, center[0] + halfWidth, center[1] + halfHeight];
      if (box[0] < 0 || box[1] < 0 || box[2] > width || box[3] > height) continue;
      if (!boxes.every((other) => apart(box, other)) || strokes.some((stroke) => strikes(stroke, box))) continue;
      const line = distance ? [[x, y], [Math.min(Math.max(x, box[0]), box[2]), Math.min(Math.max(y, box[1]), box[3])]] : null;
      const own = (other) => other[0] < x && x < other[2] && other[1] < y && y < other[3];
      if (line && walls.some((other) => !own(other) && strikes(line, other))) continue;
      if (line && !crossing && strokes.some((stroke) => strikes(stroke, outerHalf(line)))) continue;
      return { center, box, line };
    }
  return null;
}

// Around the half of a line that is farther from its point: it runs along no other line.
const outerHalf = ([from, to]) => {
  const middle = [(from[0] + to[0]) / 2, (from[1] + to[1]) / 2];
  return [Math.min(middle[0], to[0]) - 2, Math.min(middle[1], to[1]) - 2, Math.max(middle[0], to[0]) + 2, Math.max(middle[1], to[1]) + 2];
};

// Does a line between two points touch a box? (Liang and Barsky: what is left of it between the box's four sides.)
function strikes([[x1, y1], [x2, y2]], [left, top, right, bottom]) {
  let from = 0, to = 1;
  for (const [step, room] of [[x1 - x2, x1 - left], [x2 - x1, right - x1], [y1 - y2, y1 - top], [y2 - y1, bottom - y1]]) {
    if (step === 0 && room < 0) return false;
    if (step < 0) from = Math.max(from, room / step);
    if (step > 0) to = Math.min(to, room / step);
  }
  return from <= to;
}

// Labels as shapes over a plot whose corner is at (left, top).
const labelShapes = (places, texts, theme, { left, top, fontSize = 11, fill = theme.faint }) => places.flatMap((place, index) => place ? [
  ...(place.line ? [{ type: "line", silent: true, z: 5, shape: { x1: left + place.line[0][0], y1: top + place.line[0][1], x2: left + place.line[1][0], y2: top + place.line[1][1] }, style: { stroke: theme.faint, lineWidth: 0.6 } }] : []),
  { type: "text", silent: true, z: 6, x: left + place.center[0], y: top + place.center[1], style: { text: texts[index], fill, fontSize, fontFamily: "system-ui, sans-serif", align: "center", verticalAlign: "middle" } },
] : []);

// The least height, from `least` on, at which `place` finds a place for every label, and those places. Lines cross
// symbols only where no height helps.
function fittingHeight(least, place) {
  const heights = [0, 1, 2, 3, 4, 5].map((step) => Math.round(least * (1 + 0.22 * step)));
  for (const crossing of [false, true])
    for (const height of heights) {
      const places = place(height, crossing);
      if (!places.includes(null)) return { height, places };
      if (places.length > 60) return { height: heights[2], places: place(heights[2], true) }; // as many as there is room for
    }
  return { height: heights.at(-1), places: place(heights.at(-1), true) };
}

// What is computed of a chart's data at one width is computed once.
const atWidth = (compute) => {
  const known = new WeakMap();
  return (data, theme) => {
    if (!known.has(data)) known.set(data, new Map());
    const widths = known.get(data);
    if (!widths.has(theme.width)) widths.set(theme.width, compute(data, theme));
    return widths.get(theme.width);
  };
};

const pairs = (values) => values.slice(1).map((value, index) => [values[index], value]);

// Pixels of a point, from the ranges of its axes and the plot's size.
const inPixels = (x, y, width, height) => ([across, up]) => [(across - x.min) / (x.max - x.min) * width, (y.max - up) / (y.max - y.min) * height];

// Places of panels: as many columns as fit, each with room around its plot.
const panelPlaces = (count, theme, { columns, height, top, left, right = 16, above = 26, below = 44 }) => {
  const across = theme.width / columns;
  return Array.from({ length: count }, (_, index) => {
    const x = (index % columns) * across, y = top + Math.floor(index / columns) * height;
    return { x, y, across, grid: { left: x + left, top: y + above, width: across - left - right, height: height - above - below, outerBoundsMode: "none" } };
  });
};

const panelTitle = (theme, text, place) => ({
  text: shortenTo(text, 0.9 * (place.across - 8), 13), // bold is wider
  left: place.x,
  top: place.y,
  padding: 0,
  textStyle: { color: theme.ink, fontSize: 13, fontWeight: 600 },
});

// What is left white on paper, since nothing is there, has an outline only.
const isBlank = (colour) => colour == null || colour === COLOURS.blank;
const segmentLook = (colour, theme) => isBlank(colour)
  ? { color: theme.panel, borderColor: theme.faint, borderWidth: 1, borderType: "dashed" }
  : { color: onTheme(colour, theme), borderColor: theme.panel, borderWidth: 0.5 };
const segmentInk = (part, theme) => isBlank(part.colour) ? theme.ink : part.dark ? "#ffffff" : "#000000";

// A stack's last part has no length: its label stands where the stack ends.
const endLabels = (theme, texts, stack) => ({
  type: "bar",
  stack,
  silent: true,
  tooltip: { show: false },
  label: { show: true, position: "right", color: theme.ink, fontWeight: 600, fontSize: 12, formatter: ({ dataIndex }) => texts[dataIndex] },
  data: texts.map(() => 0),
});
