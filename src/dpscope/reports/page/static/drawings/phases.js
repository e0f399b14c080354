// Phases stacked, a bar a method, the whole at its end.
drawings["phases"] = (data, theme, width = 900) => {
  const totals = data.methods.map((_, place) => data.parts.reduce((sum, part) => sum + (part.ms[place] ?? 0), 0));
  const widest = Math.max(...totals);
  const range = fromZero(totals, 1.12);
  return {
    height: 44 + 46 * data.methods.length + 60,
    grid: { left: 8, right: 16, top: 40, bottom: 34, containLabel: true },
    legend: legendOf(theme, data.parts.map((part) => part.phase)),
    tooltip: tooltipOf(theme, (items) => phasesTip(data, totals, items[0].dataIndex), { trigger: "axis", axisPointer: { type: "shadow" } }),
    xAxis: valueAxis(theme, data.axis, { ...range, axisLabel: { color: theme.faint, formatter: roundLabel, hideOverlap: true } }),
    yAxis: nameAxis(theme, data.methods, width < 600 ? 12 : 28),
    series: [
      ...data.parts.map((part) => phaseBars(part, theme, widest * (width < 600 ? 0.14 : 0.06))),
      totalLabels(theme, totals.map((total) => threeDigits(total))),
    ],
  };
};

function phaseBars(part, theme, room) {
  const blank = part.colour === "#FFFFFF"; // nothing happens: on paper it is left white
  return {
    type: "bar",
    stack: "step",
    name: part.phase,
    barMaxWidth: 30,
    itemStyle: { color: blank ? theme.panel : part.colour, borderColor: blank ? theme.faint : theme.panel, borderWidth: blank ? 1 : 0.5, borderType: blank ? "dashed" : "solid" },
    label: {
      show: true,
      color: blank ? theme.ink : part.dark ? "#ffffff" : "#000000",
      fontSize: 11,
      formatter: ({ value }) => value > room ? threeDigits(value) : "",
    },
    data: part.ms,
  };
}

// A stack's last part has no length: its label stands where the stack ends.
const totalLabels = (theme, texts, stack = "step") => ({
  type: "bar",
  stack,
  silent: true,
  tooltip: { show: false },
  label: { show: true, position: "right", color: theme.ink, fontWeight: 600, fontSize: 12, formatter: ({ dataIndex }) => texts[dataIndex] },
  data: texts.map(() => 0),
});

function phasesTip(data, totals, place) {
  const lines = data.parts
    .filter((part) => part.ms[place])
    .map((part) => `${escapeText(part.phase)}: ${format.ms(part.ms[place])} (${Math.round(100 * part.ms[place] / totals[place])}%)`);
  const unprofiled = data.unprofiled_ms[place];
  const whole = unprofiled == null ? "not timed without the profiler" : `unprofiled step ${format.ms(unprofiled)}`;
  return `<b>${escapeText(data.methods[place])}</b>: ${format.ms(totals[place])}<br>${lines.join("<br>")}<br>${whole}`;
}
