// What every drawing uses: numbers as people read them (as in units.py), and a place for the drawings.

// kind -> function (data of a view, theme) -> option for ECharts. One file a kind.
const drawings = {};

const MIB = 2 ** 20, GIB = 2 ** 30;

const format = {
  bytes: (count) => count >= GIB ? `${(count / GIB).toFixed(2)} GiB` : `${(count / MIB).toFixed(1)} MiB`,
  ms: (ms) => ms >= 1e4 ? `${(ms / 1e3).toFixed(2)} s` : `${ms.toFixed(1)} ms`,
  ratio: (ratio) => ratio == null ? "—" : `${ratio.toFixed(2)}×`,
};

// Names come from results: they are text, never markup.
const escapeText = (text) => echarts.format.encodeHTML(String(text));

// The ink of methods that are drawn in black on paper.
const onTheme = (colour, theme) => colour === "#000000" ? theme.ink : colour;

// The names of methods and modules beside bars: the middle is what a long name can spare (as in words.py).
const shorten = (text, length) => {
  if (text.length <= length) return text;
  const tail = Math.floor((length - 1) / 2);
  return `${text.slice(0, length - 1 - tail)}…${text.slice(text.length - tail)}`;
};

const threeDigits = (value) => value.toFixed(Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2);

const signedBytes = (count) => (count < 0 ? "−" : "+") + format.bytes(Math.abs(count));

// How a component is filled: what only private training holds is hatched, so that it is told apart in grey print too.
const HATCH = { symbol: "rect", color: "rgba(255, 255, 255, 0.55)", dashArrayX: [1, 0], dashArrayY: [2, 4], rotation: -Math.PI / 4 };
const fillOf = (component) => ({ color: component.colour, decal: component.hatched ? HATCH : { symbol: "none" } });

const componentLegend = (components, theme, place) => ({
  type: "scroll", left: 0, right: 0, itemWidth: 14, itemHeight: 10, itemGap: 12,
  textStyle: { color: theme.ink }, pageTextStyle: { color: theme.faint }, pageIconColor: theme.accent, pageIconInactiveColor: theme.rule,
  data: components.map((component) => ({ name: component.label, itemStyle: fillOf(component) })),
  ...place,
});

// A tooltip's lines as a table, figures to the right. `cells` of a line: text, already escaped where it is from results.
const tooltipTable = (lines) => `<table>${lines.map((cells) => `<tr>${cells.map((cell, place) => `<td style="padding:0 0 0 ${place ? 12 : 0}px;text-align:${place ? "right" : "left"}">${cell}</td>`).join("")}</tr>`).join("")}</table>`;

const swatch = (colour) => `<span style="display:inline-block;width:10px;height:10px;margin-right:6px;background:${colour}"></span>`;

// Of the page's own colours, within the drawing, whatever its width.
const tooltipOn = (theme) => ({
  confine: true, backgroundColor: theme.panel, borderColor: theme.rule, textStyle: { color: theme.ink, fontSize: 12 },
});
