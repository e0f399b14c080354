// A group of bars for each module, a bar a method.
drawings["layers"] = (data, theme) => {
  const { width } = theme;
  const { axis } = data, show = format[data.unit];
  const most = Math.max(...data.lines.flatMap((line) => line.bars.map((bar) => bar?.value ?? 0)));
  const names = width < 600 ? 21 : 34;
  return {
    grid: { left: 4, right: 66, top: legendHeight(data.methods.map(({ name }) => name), width), bottom: 28, containLabel: true },
    legend: legendOf(data.methods.map(({ name }) => name), theme),
    tooltip: { ...tooltipOn(theme, width), trigger: "axis", axisPointer: { type: "shadow" }, formatter: (found) => layerInWords(data, found[0].dataIndex, theme) },
    xAxis: {
      type: "value", name: data.unit === "bytes" ? `held at the peak (${axis.name})` : `a traced step (${axis.name})`, nameLocation: "middle", nameGap: 26, nameTextStyle: { color: theme.faint },
      axisLabel: { color: theme.faint, hideOverlap: true, showMaxLabel: false }, splitNumber: width < 600 ? 3 : 6,
      max: most / axis.size || 1,
      splitLine: { lineStyle: { color: theme.rule }, showMaxLine: false },
    },
    yAxis: {
      type: "category", inverse: true, data: data.lines.map((_, place) => place), axisTick: { show: false },
      axisLine: { lineStyle: { color: theme.rule } },
      axisLabel: { color: theme.ink, interval: 0, formatter: (place) => shorten(data.lines[place].name, names) + timesOf(data.lines[place]) },
    },
    series: data.methods.map((method, place) => ({
      type: "bar", name: method.name, barMaxWidth: 16, barGap: "10%", barCategoryGap: "25%",
      itemStyle: { color: onTheme(method.colour, theme) },
      emphasis: { disabled: true },
      data: data.lines.map((line) => (line.bars[place]?.value ?? 0) / axis.size),
      label: { show: true, position: "right", color: theme.faint, fontSize: 10, formatter: ({ dataIndex }) => { const bar = data.lines[dataIndex].bars[place]; return bar ? show(bar.value) : "not listed"; } },
    })),
  };
};

drawings["layers"].height = (data, { width }) => legendHeight(data.methods.map(({ name }) => name), width) + 60 + data.lines.length * (10 + 13 * data.methods.length);

// How many modules a line stands for.
function timesOf(line) {
  const count = Math.max(...line.bars.map((bar) => bar?.count ?? 0));
  return count > 1 ? ` × ${count}` : "";
}

// A module's whole name, and what each method's bar is made of.
function layerInWords(data, place, theme) {
  const line = data.lines[place], show = format[data.unit];
  const methods = data.methods.flatMap((method, n) => {
    const bar = line.bars[n], name = `${swatch(onTheme(method.colour, theme))}<b>${escapeText(shorten(method.name, LONGEST_NAME))}</b>`;
    if (!bar) return [[name, "not listed"]];
    const each = bar.count > 1 ? ` (${bar.count} modules, each about ${show(bar.value / bar.count)})` : "";
    return [[name + each, `<b>${show(bar.value)}</b>`], ...bar.parts.map(([part, value]) => [`&emsp;${escapeText(part)}`, show(value)])];
  });
  return `<b style="display:block;max-width:20rem;white-space:normal;overflow-wrap:anywhere">${escapeText(line.name)}</b>${tooltipTable(methods)}`;
}
