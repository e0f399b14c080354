// The table of all rows: filtered, sorted and saved. Without this script it is whole, in the order of the results.

function setUpRows() {
  const table = document.getElementById("rows");
  if (!table) return;
  const body = table.tBodies[0], lines = [...body.rows];
  const filters = [...document.querySelectorAll("#rows-section [data-filter]")];
  const words = new Map(lines.map((line) => [line, line.textContent.toLowerCase()]));
  const count = document.getElementById("rows-count");

  const matches = (line) => filters.every((filter) => {
    const wanted = filter.value.trim().toLowerCase();
    if (!wanted) return true;
    if (filter.dataset.filter === "text") return wanted.split(/\s+/).every((word) => words.get(line).includes(word));
    return line.dataset[filter.dataset.filter].toLowerCase() === wanted;
  });

  function showMatching() {
    let shown = 0;
    for (const line of lines) {
      line.hidden = !matches(line);
      if (!line.hidden) shown += 1;
    }
    count.textContent = shown === lines.length ? `${shown} rows` : `${shown} of ${lines.length} rows`;
  }

  function sort(header) {
    const descending = header.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const column = header.cellIndex, sign = descending ? -1 : 1;
    const key = (line) => line.cells[column].dataset.value;
    // What is missing stays at the end, whichever way the rest goes.
    const sorted = [...body.rows].sort((one, other) => {
      const [a, b] = [key(one), key(other)];
      if (a === "" || b === "") return (a === "") - (b === "");
      return sign * (isFinite(a) && isFinite(b) ? a - b : a.localeCompare(b));
    });
    body.append(...sorted);
  }

  for (const input of filters) input.addEventListener("input", showMatching);
  for (const header of table.tHead.rows[0].cells) header.querySelector("button")?.addEventListener("click", () => sort(header));
  document.querySelector("#rows-section [data-save]").addEventListener("click", () => {
    const shown = [...body.rows].filter((line) => !line.hidden).map((line) => page.rows.rows[Number(line.dataset.row)]);
    download("rows.csv", toCsv({ columns: page.rows.columns, rows: shown }), "text/csv");
  });
  showMatching();
}
