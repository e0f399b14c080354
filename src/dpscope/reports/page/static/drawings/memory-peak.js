// A bar a method, its components stacked; what only private training holds is hatched.
drawings["memory-peak"] = (data, theme) => {
  const { width } = theme;
  const { components, bars, unit } = data;
  const narrow = width < 600, names = narrow ? 12 : 24, margin = narrow ? 66 : 124;
  const most = Math.max(...bars.map((bar) => bar.bytes.reduce((sum, count) => sum + Math.max(count, 0), 0)));
  const named = componentsToName(data);
  const room = width - margin - 7 * Math.min(names, Math.max(...bars.map((bar) => bar.method.length)));
  return {
    grid: { left: 4, right: margin, top: legendHeight(named.map(({ label }) => label), width), bottom: 28, containLabel: true },
    legend: legendOf(named.map((component) => ({ name: component.label, itemStyle: fillOf(component, theme) })), theme),
    tooltip: { ...tooltipOn(theme, width), trigger: "axis", axisPointer: { type: "shadow" }, formatter: (found) => peakInWords(data, found[0].dataIndex, theme) },
    xAxis: {
      type: "value", name: `live at the peak (${unit.name})`, nameLocation: "middle", nameGap: 26,
      nameTextStyle: { color: theme.faint }, axisLabel: { color: theme.faint, showMaxLabel: false },
      max: most / unit.size || 1, splitLine: { lineStyle: { color: theme.rule }, showMaxLine: false },
    },
    yAxis: {
      type: "category", inverse: true, data: bars.map((_, place) => place), axisTick: { show: false },
      axisLine: { lineStyle: { color: theme.rule } },
      axisLabel: { color: theme.ink, interval: 0, formatter: (place) => shorten(bars[place].method, names) },
    },
    series: [
      ...components.map((component, place) => ({
        type: "bar", stack: "peak", name: component.label, barMaxWidth: 34, barCategoryGap: "30%",
        itemStyle: { ...fillOf(component, theme), borderColor: theme.panel, borderWidth: 0.5 },
        emphasis: { disabled: true },
        // Figures are not read through a hatch: they stand on a plate of the same colour.
        label: { color: component.ink, fontSize: 11, padding: [1, 3], backgroundColor: component.hatched ? onTheme(component.colour, theme) : "transparent", formatter: ({ value }) => threeDigits(value) },
        data: bars.map((bar) => ({ value: bar.bytes[place] / unit.size, label: { show: (bar.bytes[place] / most) * room > 38 } })),
      })),
      {
        type: "bar", stack: "peak", name: "total", tooltip: { show: false }, data: bars.map(() => 0),
        label: { show: true, position: "right", color: theme.ink, formatter: ({ dataIndex }) => totalInWords(bars[dataIndex], narrow ? "\n" : "  ") },
      },
    ],
  };
};

drawings["memory-peak"].height = (data, { width }) => legendHeight(componentsToName(data).map(({ label }) => label), width) + 60 + 46 * data.bars.length;

const componentsToName = (data) => data.components.filter((_, n) => data.bars.some((bar) => Math.abs(bar.bytes[n]) >= TRIFLE * bar.total));

const totalInWords = (bar, gap) => format.bytes(bar.total) + (bar.ratio == null ? "" : gap + format.ratio(bar.ratio));

// Every component of a bar: bytes, share of the peak, difference to standard; and who made the peak.
function peakInWords(data, place, theme) {
  const bar = data.bars[place];
  const standard = data.standard == null || data.standard === place ? null : data.bars[data.standard];
  const line = (name, bytes, before) => [
    name, format.bytes(bytes), bar.total ? `${(100 * bytes / bar.total).toFixed(1)} %` : MARKS.missing, ...(standard ? [signedBytes(bytes - before)] : []),
  ];
  const held = data.components
    .map((component, n) => ({ component, bytes: bar.bytes[n], before: standard ? standard.bytes[n] : 0 }))
    .filter(({ bytes, before }) => bytes || before)
    .map(({ component, bytes, before }) => line(swatch(onTheme(component.colour, theme)) + escapeText(component.name), bytes, before));
  const head = ["", "bytes", "share", ...(standard ? ["to standard"] : [])];
  const maker = bar.maker ? `reached in ${escapeText(shorten(bar.maker, 48))}` : "";
  return `<b>${escapeText(shorten(bar.method, LONGEST_NAME))}</b><br>${maker}${tooltipTable([head, ...held, line("<b>total</b>", bar.total, standard?.total)])}`;
}
