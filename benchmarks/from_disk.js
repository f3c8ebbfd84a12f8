// Answers asv's pages where they lie on disk. asvFiles (data.js) holds every JSON file by its path.
// The last three parts stand in for small scripts that no Python package ships.
"use strict";

// Browsers refuse XMLHttpRequest to pages on disk. As there, the answer comes later.
$.ajaxTransport("+json", (options) => ({
  send(_, complete) {
    const file = asvFiles[decodeURIComponent(options.url.split("?")[0])];
    const answer = file ? [200, "success", { json: file }] : [404, "not found"];
    setTimeout(complete, 0, ...answer);
  },
  abort() {},
}));

// asv hashes the names under which a browser remembers ignored regressions; the text serves too.
window.md5 = (text) => text;

// Tables whose heads sort: data-sort names the kind of a column.
const kinds = {
  string: (a, b) => a.localeCompare(b),
  float: (a, b) => parseFloat(a) - parseFloat(b),
  int: (a, b) => parseInt(a, 10) - parseInt(b, 10),
};

$.fn.stupidtable = function (own) {
  this.data("kinds", { ...kinds, ...own });
  return this.on("click", "thead th", function () {
    $(this).stupidsort($(this).data("sort-dir") === "asc" ? "desc" : "asc");
  });
};

$.fn.stupidsort = function (direction) {
  const column = this.index();
  const table = this.closest("table");
  const compare = table.data("kinds")[this.data("sort")];
  if (!compare) return this;
  const value = (row) => {
    const cell = $(row).children().eq(column);
    return String(cell.data("sort-value") ?? cell.text());
  };
  const sign = direction === "desc" ? -1 : 1;
  const rows = table.children("tbody").children("tr").get();
  table.children("tbody").append(rows.sort((a, b) => sign * compare(value(a), value(b))));
  this.data("sort-dir", direction).siblings().removeData("sort-dir");
  table.trigger("aftertablesort", { column, direction });
  return this;
};

// Bars of several series stand side by side, in the order that each series names.
$.plot.plugins.push({
  name: "order",
  version: "1",
  init(plot) {
    plot.hooks.processDatapoints.push((_, series, { points, pointsize }) => {
      if (!series.bars.show || series.bars.order === undefined) return;
      const orders = plot.getData().map((one) => one.bars.order).sort((a, b) => a - b);
      const place = orders.indexOf(series.bars.order) - (orders.length - 1) / 2;
      for (let i = 0; i < points.length; i += pointsize) {
        points[i] += place * series.bars.barWidth;
      }
    });
  },
});
