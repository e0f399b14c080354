// DRAM bytes of a step: read and written, below families of kernels where those were looked at. Estimates are hatched.
drawings["traffic"] = (data, theme, width = 900) => {
  const largest = Math.max(...data.bars.map((bar) => bar.bytes));
  const [unit, unitName] = decimalUnit(largest);
  const families = data.parts.some((part) => part.stack === "family");
  const ends = data.bars.map((bar) => `${bar.estimated ? "≈" : ""}${format.traffic(bar.bytes)}${bar.ratio == null ? "" : `  ${bar.estimated ? "≈" : ""}${format.ratio(bar.ratio)}`}`);
  const room = largest / unit * (width < 600 ? 0.16 : 0.07);
  return {
    height: 44 + (families ? 62 : 46) * data.bars.length + 60,
    grid: { left: 8, right: 16, top: 40, bottom: 34, containLabel: true },
    legend: legendOf(theme, data.parts.map((part) => part.label)),
    tooltip: tooltipOf(theme, (items) => trafficTip(data, items[0].dataIndex), { trigger: "axis", axisPointer: { type: "shadow" } }),
    xAxis: valueAxis(theme, `DRAM bytes of a step (${unitName})`, { ...fromZero([largest / unit], width < 600 ? 1.6 : 1.2), axisLabel: { color: theme.faint, formatter: roundLabel, hideOverlap: true } }),
    yAxis: nameAxis(theme, data.bars.map((bar) => bar.method), width < 600 ? 12 : 28),
    series: [
      ...data.parts.map((part) => trafficBars(part, data.bars, theme, { unit, room, families })),
      { ...totalLabels(theme, ends, families ? "family" : "direction") },
    ],
  };
};

const decimalUnit = (largest) => [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([size]) => largest >= size) ?? [1, "B"];

function trafficBars(part, bars, theme, { unit, room, families }) {
  const slim = families && part.stack === "direction";
  const blank = part.colour == null;
  const ink = blank ? theme.ink : part.dark ? "#ffffff" : "#000000";
  // Through a hatch no figure is read: the tooltip and the end of the bar have them.
  const hatched = (bar) => bar.estimated || part.private;
  return {
    type: "bar",
    name: part.label,
    stack: part.stack,
    barWidth: slim ? 9 : 26,
    barGap: "12%",
    itemStyle: { color: blank ? theme.panel : part.colour, borderColor: blank ? theme.faint : theme.panel, borderWidth: 0.5, borderType: blank ? "dashed" : "solid" },
    label: { show: !slim, color: ink, fontSize: 11, formatter: ({ value, dataIndex }) => value > room && !hatched(bars[dataIndex]) ? threeDigits(value) : "" },
    data: part.bytes.map((count, place) => ({
      value: count == null ? null : count / unit,
      itemStyle: hatched(bars[place]) ? { decal: hatch(theme.panel), opacity: bars[place].estimated ? 0.7 : 1 } : {},
    })),
  };
}

function trafficTip(data, place) {
  const bar = data.bars[place], mark = bar.estimated ? "≈" : "";
  const amount = (count) => count == null ? "—" : `${mark}${format.traffic(count)}`;
  const families = data.parts
    .filter((part) => part.stack === "family" && part.bytes[place])
    .map((part) => `<br>${escapeText(part.label)}: ${amount(part.bytes[place])} (${Math.round(100 * part.bytes[place] / bar.bytes)}%)`);
  const share = bar.bandwidth_fraction == null ? "" : `, ${mark}${Math.round(100 * bar.bandwidth_fraction)}% of what a large copy reaches here`;
  const rate = bar.bandwidth == null ? "" : `<br>over the unprofiled step ${mark}${format.rate(bar.bandwidth, "B")}${share}`;
  return `<b>${escapeText(bar.method)}</b>${bar.estimated ? " (≈ estimate, not measured)" : " (measured)"}`
    + `<br>${amount(bar.bytes)}${bar.ratio == null ? "" : `, ${mark}${format.ratio(bar.ratio)} of standard`}`
    + `<br>read ${amount(bar.read_bytes)}, written ${amount(bar.written_bytes)}`
    + `<br>${amount(bar.per_item_bytes)} a ${escapeText(bar.item)}${rate}${families.join("")}`;
}
