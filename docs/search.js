// Ranks pages by the words that they hold. Sphinx' own search lists only pages with every word of a question, in the
// order of their titles, so that a question in a user's words finds nothing or everything. `html_search_scorer` puts
// this file into language_data.js, which the search page loads after Sphinx' searchtools.js.

var Scorer = {
  // The best page for words has 100: a heading that is the question, or an object of that name, comes before it.
  title: 200,
  objNameMatch: 300,
  objPartialMatch: 20,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
};

// How much a word counts in a page's title, in one heading of the page, and in its text.
const IN_TITLE = 3, IN_HEADING = 2, IN_TEXT = 1;
const FEWEST = 0.4; // of the best page's weight: less is noise

function rankPages(searchTerms, excludedTerms) {
  const index = Search._index, stemmer = new Stemmer(), number = index.docnames.length;
  const pagesWith = (word) => new Set([index.terms[word] ?? [], index.titleterms[word] ?? []].flat());
  const stems = (text) => new Set(splitQuery(text.toLowerCase()).map((word) => stemmer.stemWord(word)));
  const excluded = new Set([...excludedTerms].flatMap((word) => [...pagesWith(word)]));

  // A word that few pages have says more about what is asked for.
  const words = [...searchTerms].map((word) => ({ word, pages: pagesWith(word) })).filter(({ pages }) => pages.size);
  words.forEach((one) => (one.weight = Math.log(1 + number / one.pages.size)));
  const found = Array.from({ length: number }, () => ({ weight: 0, heading: 0, title: "", anchor: "" }));
  words.forEach(({ pages, weight }) => pages.forEach((page) => (found[page].weight += IN_TEXT * weight)));

  const weightOf = (present, but) =>
    words.reduce((sum, { word, weight }) => sum + (present.has(word) && !but.has(word) ? weight : 0), 0);

  index.titles.forEach((title, page) => (found[page].weight += (IN_TITLE - IN_TEXT) * weightOf(stems(title), new Set())));
  for (const [title, places] of Object.entries(index.alltitles)) {
    const present = stems(title);
    if (!words.some(({ word }) => present.has(word))) continue;
    for (const [page, id] of places) {
      const weight = weightOf(present, stems(index.titles[page])); // what the heading adds to the page's title
      if (id !== null && weight > found[page].heading) Object.assign(found[page], { heading: weight, title, anchor: "#" + id });
    }
  }
  found.forEach((one) => (one.weight += (IN_HEADING - IN_TEXT) * one.heading));
  const best = Math.max(...found.map((one) => one.weight));
  return found.flatMap(({ weight, title, anchor }, page) => {
    if (weight === 0 || weight < FEWEST * best || excluded.has(page)) return [];
    const shown = title ? `${index.titles[page]} > ${title}` : index.titles[page];
    const score = Math.round((100 * weight) / best);
    return [[index.docnames[page], shown, anchor, null, score, index.filenames[page], SearchResultKind.text]];
  });
}

Search.performTermsSearch = rankPages;
