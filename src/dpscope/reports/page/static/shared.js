// What every drawing uses: numbers as people read them (as in units.py), and a place for the drawings.

// kind -> function (data of a view, theme) -> option for ECharts. One file a kind.
// A drawing may have a `height` of its own: function (data, theme) -> pixels. `zooms`: it has a part to look at closer.
const drawings = {};

const page = JSON.parse(document.getElementById("data").textContent);

// What Python and these scripts have to agree on is defined there (`CONSTANTS` in page/render.py).
const { units: { KIB, MIB, GIB }, trifle: TRIFLE, marks: MARKS, colours: COLOURS } = page.constants;

const format = {
  bytes: (count) => {
    const size = Math.abs(count);
    if (size >= GIB - MIB / 20) return `${(count / GIB).toFixed(2)} GiB`;
    if (size >= MIB / 20 || !size) return `${(count / MIB).toFixed(1)} MiB`;
    return size >= KIB ? `${(count / KIB).toFixed(1)} KiB` : `${count.toFixed(0)} B`;
  },
  ms: (ms) => ms >= 1e4 ? `${(ms / 1e3).toFixed(2)} s` : `${ms.toFixed(1)} ms`,
  // Three digits and a prefix: bytes that were moved, and rates, are in decimal units.
  decimal: (value, unit) => {
    const [size, prefix] = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([least]) => Math.abs(value) >= 0.9995 * least) ?? [1, ""];
    const scaled = Math.abs(value) / size;
    return `${(value / size).toFixed(size === 1 ? 0 : scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0)} ${prefix}${unit}`;
  },
  traffic: (count) => format.decimal(count, "B"),
  rate: (perSecond, unit) => `${format.decimal(perSecond, unit)}/s`,
  ratio: (ratio) => ratio == null ? MARKS.missing : `${ratio.toFixed(2)}×`,
};

// Names come from results: they are text, never markup.
const escapeText = (text) => echarts.format.encodeHTML(String(text));

// The ink of methods that are drawn in black on paper, and colours that are seen on a dark panel.
const isDark = (theme) => parseInt(theme.panel.slice(1, 3), 16) < 128;
const onTheme = (colour, theme) => colour === COLOURS.ink ? theme.ink : isDark(theme) ? COLOURS.on_dark[colour] ?? colour : colour;

// The names of methods and modules beside bars: the middle is what a long name can spare (as in words.py). It is cut
// between words where there are any near.
const shorten = (text, length) => {
  if (text.length <= length) return text;
  const tail = Math.floor((length - 1) / 2), head = length - 1 - tail;
  const start = text.slice(0, head), end = text.slice(text.length - tail);
  const whole = { start: start.match(/^.*[._:\s/-](?=[^._:\s/-]*$)/)?.[0] ?? "", end: end.match(/[._:\s/-].*$/)?.[0] ?? "" };
  const near = (part, all) => part.length >= 0.7 * all.length ? part : all;
  return `${near(whole.start, start)}…${near(whole.end, end)}`;
};

const threeDigits = (value) => value.toFixed(Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2);

const signedBytes = (count) => count ? (count < 0 ? "−" : "+") + format.bytes(Math.abs(count)) : "same";

// How a component is filled: what only private training holds is hatched, so that it is told apart in grey print too.
const HATCH = { symbol: "rect", color: "rgba(255, 255, 255, 0.55)", dashArrayX: [1, 0], dashArrayY: [2, 4], rotation: -Math.PI / 4 };
const fillOf = (component, theme) => ({ color: onTheme(component.colour, theme), decal: component.hatched ? HATCH : { symbol: "none" } });

const LONGEST_NAME = 36; // characters, where a phone has room for one name

// Names that wrap: a legend to leaf through loses its later pages in print and in a saved picture.
const legendOf = (entries, theme) => ({
  type: "plain", top: 0, left: 0, padding: [3, 0], itemWidth: 14, itemHeight: 10, itemGap: 14, icon: "rect", textStyle: { color: theme.ink }, data: entries,
  formatter: (name) => shorten(name, LONGEST_NAME),
});

const pen = document.createElement("canvas").getContext("2d");

// ECharts takes the width of this character for the height of a line. A reader without a Chinese font has a narrow box in
// its place, and lines would lie on each other: it is as wide as the font is high.
const SQUARE = "国";
const sizeOfFont = (font) => parseFloat(/([\d.]+)px/.exec(font)?.[1] ?? 12);
echarts.setPlatformAPI({
  measureText: (text, font) => {
    pen.font = font;
    return text === SQUARE ? { width: sizeOfFont(font) } : pen.measureText(text);
  },
});

const textWidth = (text, size = 12) => {
  pen.font = `${size}px system-ui, sans-serif`;
  return pen.measureText(text).width;
};

// As much of a text as `width` pixels hold.
const shortenTo = (text, width, size) => {
  let length = text.length;
  while (length > 3 && textWidth(shorten(text, length), size) > width) length -= 1;
  return shorten(text, length);
};

const widest = (texts, size) => Math.max(...texts.map((text) => textWidth(text, size)));

// Its height in pixels: a drawing begins below it.
function legendHeight(names, width) {
  const widths = names.map((name) => 14 + 5 + textWidth(shorten(name, LONGEST_NAME)) + 14);
  let lines = 1, used = 0;
  for (const each of widths) {
    if (used && used + each > width) { lines += 1; used = 0; }
    used += each;
  }
  return 26 * lines + 4;
}

// A tooltip's lines as a table, figures to the right. `cells` of a line: text, already escaped where it is from results.
const tooltipTable = (lines) => `<table>${lines.map((cells) => `<tr>${cells.map((cell, place) => `<td style="padding:0 0 0 ${place ? 0.8 : 0}em;text-align:${place ? "right" : "left"}">${cell}</td>`).join("")}</tr>`).join("")}</table>`;

const swatch = (colour) => `<span style="display:inline-block;width:10px;height:10px;margin-right:6px;background:${colour}"></span>`;

// Of the page's own colours, within the drawing, whatever its width.
const tooltipOn = (theme, width) => ({
  confine: true, padding: width < 600 ? 5 : 8, backgroundColor: theme.panel, borderColor: theme.rule, textStyle: { color: theme.ink, fontSize: width < 600 ? 10 : 12 },
});
