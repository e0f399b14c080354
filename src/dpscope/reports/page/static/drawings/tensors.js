// The largest tensors at the peak: a panel a method, a bar a tensor, named by its shape and the line that made it.
drawings["tensors"] = (data, theme) => {
  const { size, name } = data.axis;
  const names = Math.min(0.56 * theme.width, 460); // pixels for shapes and lines
  const places = panelPlaces(data.panels.length, theme, { columns: 1, height: tensorsHeight(data), top: 0, left: names, right: 20, above: 24, below: 48 });
  const largest = Math.max(...data.panels.flatMap((panel) => panel.bars.map((bar) => bar.bytes))) / size;
  const beside = (bar) => format.bytes(bar.bytes) + tensorCount(bar) + (theme.width < 860 ? "" : ` · ${bar.name}`);
  const room = widest(data.panels.flatMap((panel) => panel.bars.map(beside)), 11) + 8; // pixels for figures beside bars
  const width = Math.max(places[0].grid.width, 1.3 * room);
  const range = ticked(0, largest * width / (width - room), width < 300 ? 2 : 4);
  return {
    tooltip: tooltipOf(theme, ({ data: item }) => tensorTip(item.bar)),
    title: data.panels.map((panel, index) => panelTitle(theme, panel.method, places[index])),
    grid: places.map((place) => place.grid),
    xAxis: data.panels.map((_, index) => ({ gridIndex: index, ...valueAxis(theme, name, { ...range, nameGap: 24 }) })),
    yAxis: data.panels.map((panel, index) => tensorNames(panel, index, theme, names)),
    series: data.panels.map((panel, index) => ({
      type: "bar",
      xAxisIndex: index,
      yAxisIndex: index,
      barMaxWidth: 13,
      data: panel.bars.map((bar) => ({
        value: bar.bytes / size,
        bar,
        itemStyle: fillOf(bar, theme),
        label: { show: true, position: "right", color: theme.ink, fontSize: 11, formatter: beside(bar) },
      })),
    })),
  };
};

const tensorsHeight = (data) => 76 + 19 * Math.max(...data.panels.map((panel) => panel.bars.length));

drawings["tensors"].height = (data) => tensorsHeight(data) * data.panels.length;

const tensorCount = (bar) => bar.count > 1 ? ` × ${bar.count}` : "";

// The shape whole; of the line as much as there is room for. The tooltip and the table have it whole.
function tensorNames(panel, index, theme, width) {
  const label = ({ shape, where, short }) => {
    const room = width - 14 - textWidth(`${shape}  `, 11);
    const line = textWidth(where, 11) <= room ? where : shortenTo(short, room, 11);
    return room > 60 ? `${line}  ${shape}` : shortenTo(shape, width - 14, 11);
  };
  return nameAxis(theme, panel.bars.map((_, place) => String(place)), 80, {
    gridIndex: index,
    axisLabel: { color: theme.ink, fontSize: 11, interval: 0, formatter: (place) => label(panel.bars[Number(place)]) },
  });
}

function tensorTip(bar) {
  const phase = bar.phase ? ` in ${escapeText(bar.phase)}` : "";
  return `<b>${escapeText(bar.shape)}</b><br>${format.bytes(bar.bytes)}${tensorCount(bar)}`
    + `<br>${escapeText(bar.name)}<br>${escapeText(bar.maker)}${phase}<br>${escapeText(bar.where)}`;
}
