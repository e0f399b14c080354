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

// Both ends of a long name: they are what tells names apart (as in words.py).
const shorten = (text, length) => {
  if (text.length <= length) return text;
  const tail = Math.floor((length - 1) / 2);
  return `${text.slice(0, length - 1 - tail)}…${tail ? text.slice(-tail) : ""}`;
};

const threeDigits = (value) => value.toFixed(Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2);

// The unit an axis is read in: the largest of which there are two.
const byteUnit = (largest) => [[GIB, "GiB"], [MIB, "MiB"], [1024, "KiB"]].find(([size]) => largest >= 2 * size) ?? [1, "B"];

const tooltipOf = (theme, formatter, more = {}) => ({
  trigger: "item",
  confine: true,
  backgroundColor: theme.panel,
  borderColor: theme.rule,
  textStyle: { color: theme.ink, fontSize: 13 },
  extraCssText: "max-width: min(30rem, 90vw); white-space: normal; overflow-wrap: anywhere;",
  formatter,
  ...more,
});

const legendOf = (theme, data, more = {}) => ({
  type: "scroll",
  top: 0,
  left: 0,
  right: 0,
  itemWidth: 14,
  itemHeight: 10,
  itemGap: 14,
  textStyle: { color: theme.ink },
  pageTextStyle: { color: theme.faint },
  pageIconColor: theme.ink,
  pageIconInactiveColor: theme.rule,
  formatter: (name) => shorten(name, 24),
  data,
  ...more,
});

// One entry a method, whatever the number of its lines and panels.
const methodLegend = (theme, lines) => {
  const first = new Map(lines.map((line) => [line.method, line]).reverse());
  return legendOf(theme, [...first.values()].reverse().map((line) => ({
    name: line.method,
    icon: SYMBOLS[line.marker],
    itemStyle: { color: onTheme(line.colour, theme), borderColor: onTheme(line.colour, theme) },
  })), { itemWidth: 12, itemHeight: 12 });
};

const axisLook = (theme) => ({
  axisLine: { show: true, lineStyle: { color: theme.faint } },
  axisTick: { show: false },
  axisLabel: { color: theme.faint, hideOverlap: true },
  splitLine: { lineStyle: { color: theme.rule, opacity: 0.6 } },
  nameTextStyle: { color: theme.faint },
});

const valueAxis = (theme, name, more = {}) => ({ type: "value", name, nameLocation: "middle", nameGap: 26, ...axisLook(theme), ...more });

// Names down the left side, cut in the middle where there is no room.
const nameAxis = (theme, names, letters, more = {}) => {
  const look = axisLook(theme);
  return {
    type: "category",
    inverse: true,
    data: names,
    ...look,
    axisLabel: { color: theme.ink, interval: 0, formatter: (name) => shorten(name, letters) },
    splitLine: { show: false },
    ...more,
  };
};

// A step of 1, 2 or 5 times a power of ten: about `count` of them in a span.
const roundStep = (span, count) => {
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
};

const onSteps = (low, high, count = 5) => {
  const interval = roundStep(high - low, count);
  return { min: Math.floor(low / interval + 1e-9) * interval, max: Math.ceil(high / interval - 1e-9) * interval, interval };
};

// From zero to a round number above the largest value.
const fromZero = (values, room = 1.1) => onSteps(0, Math.max(...values) * room || 1);

// Room around the values, and never so close up that noise looks like a difference (as in figures/tradeoff.py).
const around = (values) => {
  const low = Math.min(...values), high = Math.max(...values);
  const span = Math.max(high - low, 0.3 * high), middle = (low + high) / 2;
  return onSteps(Math.max(middle - 0.6 * span, 0), middle + 0.6 * span);
};

// Axis labels without the crumbs of binary fractions.
const roundLabel = (value) => String(+value.toPrecision(6));

// What is an estimate, or of privacy only, is hatched: it has to stand out in grey print too.
const hatch = (colour) => ({ symbol: "rect", color: colour, dashArrayX: [1, 0], dashArrayY: [2, 4], rotation: -Math.PI / 4 });

// Places of panels: as many columns as fit, each with room around its plot.
const panelPlaces = (count, { width, columns, height, top = 34, left, right = 16, above = 26, below = 44 }) => {
  const across = width / columns;
  return {
    height: top + Math.ceil(count / columns) * height,
    places: Array.from({ length: count }, (_, index) => {
      const x = (index % columns) * across, y = top + Math.floor(index / columns) * height;
      return { x, y, grid: { left: x + left, top: y + above, width: across - left - right, height: height - above - below } };
    }),
  };
};

const panelTitle = (theme, text, place, width) => ({
  text: shorten(text, Math.floor(width / 7)),
  left: place.x,
  top: place.y,
  padding: 0,
  textStyle: { color: theme.ink, fontSize: 13, fontWeight: 600 },
});
