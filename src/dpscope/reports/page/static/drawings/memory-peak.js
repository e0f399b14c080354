// A bar a method, its components stacked; what only private training holds is hatched.
drawings["memory-peak"] = (data, theme, width) => {
  const { components, bars, unit } = data;
  const names = width < 600 ? 12 : 24;
  const most = Math.max(...bars.map((bar) => bar.bytes.reduce((sum, count) => sum + Math.max(count, 0), 0)));
  const room = width - 120 - 7 * Math.min(names, Math.max(...bars.map((bar) => bar.method.length)));
  return {
    grid: { left: 4, right: 118, top: 44, bottom: 28, containLabel: true },
    legend: componentLegend(components, theme, { top: 0 }),
    tooltip: { ...tooltipOn(theme), trigger: "axis", axisPointer: { type: "shadow" }, formatter: (found) => peakInWords(data, found[0].dataIndex) },
    xAxis: {
      type: "value", name: `live at the peak (${unit.name})`, nameLocation: "middle", nameGap: 26,
      nameTextStyle: { color: theme.faint }, axisLabel: { color: theme.faint }, splitLine: { lineStyle: { color: theme.rule } },
    },
    yAxis: {
      type: "category", inverse: true, data: bars.map((_, place) => place), axisTick: { show: false },
      axisLine: { lineStyle: { color: theme.rule } },
      axisLabel: { color: theme.ink, interval: 0, formatter: (place) => shorten(bars[place].method, names) },
    },
    series: [
      ...components.map((component, place) => ({
        type: "bar", stack: "peak", name: component.label, barMaxWidth: 34, barCategoryGap: "30%",
        itemStyle: { ...fillOf(component), borderColor: theme.panel, borderWidth: 0.5 },
        data: bars.map((bar) => bar.bytes[place] / unit.size),
        label: {
          show: true, color: component.ink, fontSize: 11, padding: [1, 3],
          backgroundColor: component.hatched ? component.colour : "transparent", // figures are not read through a hatch
          formatter: ({ value }) => (value * unit.size / most) * room > 38 ? threeDigits(value) : "",
        },
      })),
      {
        type: "bar", stack: "peak", name: "total", tooltip: { show: false }, data: bars.map(() => 0),
        label: { show: true, position: "right", color: theme.ink, formatter: ({ dataIndex }) => totalInWords(bars[dataIndex]) },
      },
    ],
  };
};

drawings["memory-peak"].height = (data) => 110 + 46 * data.bars.length;

const totalInWords = (bar) => format.bytes(bar.total) + (bar.ratio == null ? "" : `  ${format.ratio(bar.ratio)}`);

// Every component of a bar: bytes, share of the peak, difference to standard; and who made the peak.
function peakInWords(data, place) {
  const bar = data.bars[place];
  const standard = data.standard == null || data.standard === place ? null : data.bars[data.standard];
  const line = (name, bytes, before) => [
    name, format.bytes(bytes), `${(100 * bytes / bar.total).toFixed(1)} %`, ...(standard ? [signedBytes(bytes - before)] : []),
  ];
  const held = data.components
    .map((component, n) => ({ component, bytes: bar.bytes[n], before: standard ? standard.bytes[n] : 0 }))
    .filter(({ bytes, before }) => bytes || before)
    .map(({ component, bytes, before }) => line(swatch(component.colour) + escapeText(component.label), bytes, before));
  const head = ["", "bytes", "share", ...(standard ? ["to standard"] : [])];
  const maker = bar.maker ? `reached in ${escapeText(shorten(bar.maker, 70))}` : "";
  return `<b>${escapeText(bar.method)}</b><br>${maker}${tooltipTable([head, ...held, line("<b>total</b>", bar.total, standard?.total)])}`;
}
