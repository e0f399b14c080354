// A group of bars for each module, a bar a method.
drawings["layers"] = (data, theme, width) => {
  const show = format[data.unit];
  const names = width < 600 ? 16 : 34;
  return {
    grid: { left: 4, right: 76, top: 36, bottom: 28, containLabel: true },
    legend: { type: "scroll", top: 0, left: 0, right: 0, itemWidth: 14, itemHeight: 10, textStyle: { color: theme.ink }, pageTextStyle: { color: theme.faint }, pageIconColor: theme.accent },
    tooltip: { ...tooltipOn(theme), trigger: "axis", axisPointer: { type: "shadow" }, formatter: (found) => layerInWords(data, found[0].dataIndex, theme) },
    xAxis: {
      type: "value", axisLabel: { color: theme.faint, hideOverlap: true, formatter: show }, splitNumber: width < 600 ? 2 : 5,
      splitLine: { lineStyle: { color: theme.rule } },
    },
    yAxis: {
      type: "category", inverse: true, data: data.lines.map((_, place) => place), axisTick: { show: false },
      axisLine: { lineStyle: { color: theme.rule } },
      axisLabel: { color: theme.ink, interval: 0, formatter: (place) => shorten(data.lines[place].name, names) },
    },
    series: data.methods.map((method, place) => ({
      type: "bar", name: method.name, barMaxWidth: 16, barGap: "10%", barCategoryGap: "25%",
      itemStyle: { color: onTheme(method.colour, theme) },
      data: data.lines.map((line) => line.bars[place]?.value ?? null),
      label: { show: true, position: "right", color: theme.faint, fontSize: 10, formatter: ({ value }) => value == null ? "" : show(value) },
    })),
  };
};

drawings["layers"].height = (data) => 80 + data.lines.length * (10 + 13 * data.methods.length);

// A module's whole name, and what each method's bar is made of.
function layerInWords(data, place, theme) {
  const line = data.lines[place], show = format[data.unit];
  const methods = data.methods.flatMap((method, n) => {
    const bar = line.bars[n], name = `${swatch(onTheme(method.colour, theme))}<b>${escapeText(method.name)}</b>`;
    if (!bar) return [[name, "not listed"]];
    const each = bar.count > 1 ? ` (each of ${bar.count} listed)` : "";
    return [[name + each, `<b>${show(bar.value)}</b>`], ...bar.parts.map(([part, value]) => [`&emsp;${escapeText(part)}`, show(value)])];
  });
  return `<b style="white-space:normal;overflow-wrap:anywhere">${escapeText(line.name)}</b>${tooltipTable(methods)}`;
}
