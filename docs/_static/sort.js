// Sort the tables inside <div class="sortable"> by a click on a heading: numbers by value, all else by letter.
document.addEventListener("DOMContentLoaded", () => {
  const value = (row, column) => row.cells[column].textContent.trim();
  const number = (text) => parseFloat(text.replace(/[,\s]|>=/g, ""));
  const compare = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1; // cells without a number go last
    return isNaN(x) ? a.localeCompare(b) : x - y;
  };
  for (const table of document.querySelectorAll(".sortable table")) {
    const body = table.tBodies[0];
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      const button = document.createElement("button");
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const down = heading.getAttribute("aria-sort") === "ascending";
        headings.forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].sort((a, b) => compare(value(a, column), value(b, column)));
        body.append(...(down ? rows.reverse() : rows));
      });
    });
  }
});
