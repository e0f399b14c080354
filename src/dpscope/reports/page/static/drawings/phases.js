// Phases stacked, a bar a method, the whole at its end.
drawings["phases"] = (data, theme) => {
  const totals = data.methods.map((_, place) => data.parts.reduce((sum, part) => sum + (part.ms[place] ?? 0), 0));
  const names = data.parts.map((part) => part.phase);
  const room = Math.max(...totals) * (isNarrow(theme) ? 0.16 : 0.06); // that a figure needs
  return {
    grid: { left: 8, right: 16, top: legendHeight(names, theme.width), bottom: 34, containLabel: true },
    legend: legendOf(names, theme),
    tooltip: tooltipOf(theme, (items) => phasesTip(data, totals, items[0].dataIndex), { trigger: "axis", axisPointer: { type: "shadow" } }),
    xAxis: valueAxis(theme, data.axis, fromZero(totals, isNarrow(theme) ? 1.24 : 1.1)),
    yAxis: nameAxis(theme, data.methods, isNarrow(theme) ? 12 : 28),
    series: [
      ...data.parts.map((part) => ({
        type: "bar",
        stack: "step",
        name: part.phase,
        barMaxWidth: 30,
        itemStyle: segmentLook(part.colour, theme),
        label: { show: true, color: segmentInk(part, theme), fontSize: 11, formatter: ({ value }) => value > room ? threeDigits(value) : "" },
        data: part.ms,
      })),
      endLabels(theme, totals.map(threeDigits), "step"),
    ],
  };
};

drawings["phases"].height = (data, theme) => legendHeight(data.parts.map((part) => part.phase), theme.width) + 46 * data.methods.length + 56;

function phasesTip(data, totals, place) {
  const lines = data.parts
    .filter((part) => part.ms[place])
    .map((part) => `${escapeText(part.phase)}: ${format.ms(part.ms[place])} (${Math.round(100 * part.ms[place] / totals[place])}%)`);
  const unprofiled = data.unprofiled_ms[place];
  const whole = unprofiled == null ? "not timed without the profiler" : `unprofiled step ${format.ms(unprofiled)}`;
  return `<b>${escapeText(data.methods[place])}</b>: ${format.ms(totals[place])}<br>${lines.join("<br>")}<br>${whole}`;
}
