// What every drawing uses: numbers as people read them (as in units.py), and a place for the drawings.

// kind -> function (data of a view, theme) -> option for ECharts. One file a kind.
// A drawing may have a `height` of its own: function (data, theme) -> pixels.
const drawings = {};

const KIB = 2 ** 10, MIB = 2 ** 20, GIB = 2 ** 30;

const format = {
  bytes: (count) => {
    const size = Math.abs(count);
    if (size >= GIB - MIB / 20) return `${(count / GIB).toFixed(2)} GiB`;
    if (size >= MIB / 20 || !size) return `${(count / MIB).toFixed(1)} MiB`;
    return size >= KIB ? `${(count / KIB).toFixed(1)} KiB` : `${count.toFixed(0)} B`;
  },
  ms: (ms) => ms >= 1e4 ? `${(ms / 1e3).toFixed(2)} s` : `${ms.toFixed(1)} ms`,
  ratio: (ratio) => ratio == null ? "—" : `${ratio.toFixed(2)}×`,
};

// Names come from results: they are text, never markup.
const escapeText = (text) => echarts.format.encodeHTML(String(text));

// The ink of methods that are drawn in black on paper.
const onTheme = (colour, theme) => colour === "#000000" ? theme.ink : colour;
