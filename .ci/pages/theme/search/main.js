// The search of MkDocs asks a server for its index, in a worker. Pages that are read from a folder
// may do neither, but they may load scripts: so the index is one, and all runs on the page itself.
(function () {
  var results = document.getElementById("mkdocs-search-results");
  var input = document.getElementById("mkdocs-search-query");
  if (!results || !input) return; // not the page of results

  function load(name, then) {
    var script = document.createElement("script");
    script.src = base_url + "/search/" + name;
    script.onload = then;
    document.body.appendChild(script);
  }

  function show(found, pages) {
    results.textContent = found.length ? "" : results.dataset.noResultsText;
    found.forEach(function (each) {
      var page = pages[each.ref], article = document.createElement("article");
      var link = document.createElement("a"), text = document.createElement("p");
      link.href = base_url + "/" + page.location;
      link.textContent = page.title;
      text.textContent = page.text.slice(0, 200);
      article.appendChild(document.createElement("h3")).appendChild(link);
      article.appendChild(text);
      results.appendChild(article);
    });
  }

  function begin() {
    var pages = {};
    var index = lunr(function () {
      this.field("title");
      this.field("text");
      this.ref("location");
      search_index.docs.forEach(function (page) {
        pages[page.location] = page;
        this.add(page);
      }, this);
    });
    function search() {
      var words = input.value.trim();
      var typed = words.replace(/[:*~^+\-]/g, " "); // lunr's own signs; names have some of them
      show(typed.length > 2 ? index.search(typed) : [], pages);
    }
    input.value = new URLSearchParams(window.location.search).get("q") || "";
    input.addEventListener("keyup", search);
    search();
  }

  load("lunr.js", function () {
    load("search_index.js", begin);
  });
})();
