// What every drawing uses: numbers as people read them (as in units.py), and a place for the drawings.

// kind -> function (data of a view, theme, width in pixels) -> option for ECharts, with the height the drawing needs. One file a kind.
const drawings = {};

const MIB = 2 ** 20, GIB = 2 ** 30;

const format = {
  bytes: (count) => count >= GIB ? `${(count / GIB).toFixed(2)} GiB` : `${(count / MIB).toFixed(1)} MiB`,
  ms: (ms) => ms >= 1e4 ? `${(ms / 1e3).toFixed(2)} s` : `${ms.toFixed(1)} ms`,
  // Three digits and a prefix: bytes that were moved, and rates, are in decimal units.
  decimal: (value, unit) => {
    const [size, prefix] = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([least]) => Math.abs(value) >= 0.9995 * least) ?? [1, ""];
    const scaled = Math.abs(value) / size;
    return `${(value / size).toFixed(size === 1 ? 0 : scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0)} ${prefix}${unit}`;
  },
  traffic: (count) => format.decimal(count, "B"),
  rate: (perSecond, unit) => `${format.decimal(perSecond, unit)}/s`,
  ratio: (ratio) => ratio == null ? "—" : `${ratio.toFixed(2)}×`,
};

// Names come from results: they are text, never markup.
const escapeText = (text) => echarts.format.encodeHTML(String(text));

// The ink of methods that are drawn in black on paper.
const onTheme = (colour, theme) => colour === "#000000" ? theme.ink : colour;
