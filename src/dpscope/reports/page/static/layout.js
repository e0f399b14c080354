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
const byteUnit = (largest) => [[GIB, "GiB"], [MIB, "MiB"], [1024, "KiB"]].find(([size]) => largest >= 2 * size) ?? [1, "B"];

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

// Where a label beside each point covers no other label, no point and nothing that is `taken`, and is within `width`: a
// position, or null where there is none. `points`: pixels; `size`: of their symbols.
const labelPositions = (points, texts, { size, width: all, fontSize = 11, taken = [] }) => {
  const boxes = points.map(([x, y]) => [x - size / 2, y - size / 2, x + size / 2, y + size / 2]).concat(taken);
  const apart = (one, other) => one[2] <= other[0] || other[2] <= one[0] || one[3] <= other[1] || other[3] <= one[1];
  return points.map(([x, y], place) => {
    const width = textWidth(texts[place], fontSize) + 4, half = fontSize / 2 + 1, off = size / 2 + 4;
    const around = {
      right: [x + off, y - half, x + off + width, y + half],
      left: [x - off - width, y - half, x - off, y + half],
      top: [x - width / 2, y - off - 2 * half, x + width / 2, y - off],
      bottom: [x - width / 2, y + off, x + width / 2, y + off + 2 * half],
    };
    const found = Object.entries(around).find(([, box]) => box[0] >= 0 && box[2] <= all && boxes.every((other) => apart(box, other)));
    if (!found) return null;
    boxes.push(found[1]);
    return found[0];
  });
};

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
const isBlank = (colour) => colour == null || colour === "#FFFFFF";
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
