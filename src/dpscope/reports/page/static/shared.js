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
