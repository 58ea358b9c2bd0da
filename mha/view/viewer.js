// The page: what is chosen, and who draws it. Events change the state and ask for a drawing, which
// comes once before the next frame.

const byId = id => document.getElementById(id);
const STRONGEST = 10; // tokens listed beside the isolated one
const MOST_TITLE = 90; // letters of a title in the list of sentences

class Viewer {
  // sentences: the elements that hold what can be shown, one at a time.
  constructor(sentences) {
    this.sentences = sentences;
    this.state = {
      sentence: null,   // index of the one that is shown
      chosen: [0],      // indices of heads
      mode: "lines",    // or "heat-map"
      places: {lines: null, "heat-map": 0}, // of the slider; null: where firstThreshold says
      isolated: null,   // {query}, {key} or, in a heat map, {query, key}
      kept: false,      // whether a click keeps it
    };
    byId("sentence-label").hidden = sentences.length === 1;
    byId("sentence").replaceChildren(...sentences.map((data, index) => {
      const {title} = JSON.parse(data.textContent);
      return new Option(`${index + 1}: ${visible(title.slice(0, MOST_TITLE))}`, index);
    }));
  }

  // Shows what the address says.
  async follow() {
    const {sentence, heads, mode} = readAddress();
    await this.open(this.sentences[sentence] ? sentence : 0);
    const chosen = heads.map(({layer, head}) => this.weights.indexOf(layer, head)).filter(index => index >= 0);
    this.change({chosen: chosen.length ? [...new Set(chosen)] : [0]});
    this.setMode(mode);
    this.showControls();
  }

  // Shows a sentence, with the heads that are chosen where it has them.
  async open(sentence) {
    if (this.state.sentence === sentence) {
      return;
    }
    this.state.sentence = sentence;
    const data = JSON.parse(this.sentences[sentence].textContent);
    const codes = await unpack(data);
    if (this.state.sentence === sentence) { // no other one has been asked for meanwhile
      this.show(new Weights(data, codes), data.title);
    }
  }

  show(weights, title) {
    this.weights = weights;
    byId("title").textContent = title && visible(title);
    byId("sentence").value = this.state.sentence;
    for (const id of ["overview", "several-label", "grid-hint"]) {
      byId(id).hidden = weights.heads.length === 1;
    }
    const chosen = this.state.chosen.filter(head => head < weights.heads.length);
    this.grid = new Grid(emptied("grid"), weights, (heads, adds) => this.choose(heads, adds));
    this.lines = new Lines(byId("line-canvas"), weights);
    this.queries = this.tokenList("queries", weights.tokens, "query");
    this.keys = this.tokenList("keys", weights.keyTokens, "key");
    this.heatMaps = new HeatMaps(emptied("heat-maps"), weights, {
      point: cell => this.isolate(cell),
      keep: cell => cell ? this.keep(cell) : this.letGo(),
      moveTo: cell => this.change({isolated: cell, kept: true}),
      at: () => this.state.isolated,
    });
    this.row = Math.max(weights.queryLen, weights.keyLen) > 60 ? 16 : 22;
    document.documentElement.style.setProperty("--row", `${this.row}px`);
    this.shownChosen = this.shownIsolated = null;
    this.change({chosen: chosen.length ? chosen : [0]});
    this.setTheme(this.isDark ?? matchMedia("(prefers-color-scheme: dark)").matches);
    this.setMode(this.state.mode);
  }

  tokenList(id, tokens, side) {
    return new TokenList(emptied(id), tokens, side, {
      isolate: index => this.isolate(index === null ? null : {[side]: index}),
      keep: index => this.keep({[side]: index}),
      cross: index => (side === "query" ? this.keys : this.queries).focus(index),
    });
  }

  listen() {
    byId("sentence").addEventListener("change", event => this.open(Number(event.target.value)));
    window.addEventListener("hashchange", () => this.follow());
    byId("grid").parentElement.addEventListener("scroll", () => this.grid.hintAtMore(byId("more-heads")));
    for (const radio of document.querySelectorAll("input[name=mode]")) {
      radio.addEventListener("change", () => this.setMode(radio.value));
    }
    byId("threshold").addEventListener("input", event => {
      this.state.places[this.state.mode] = Number(event.target.value);
      this.setThreshold(this.place());
    });
    byId("theme").addEventListener("click", () => this.setTheme(!this.isDark));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", event => this.setTheme(event.matches));
    document.addEventListener("keydown", event => {
      if (event.key === "Escape") {
        this.letGo();
      }
    });
    byId("let-go").addEventListener("click", () => {
      this.letGo();
      byId("isolated-title").focus(); // the button goes
    });
    window.addEventListener("resize", () => this.change({}));
    // Paper is white.
    window.addEventListener("beforeprint", () => {
      this.wasDark ??= this.isDark; // it may be said twice
      this.setTheme(false);
      this.grid.paintAll(this.colours);
      this.draw();
    });
    window.addEventListener("pageshow", () => this.showControls()); // a browser may fill them in again
    window.addEventListener("afterprint", () => {
      this.setTheme(this.wasDark ?? this.isDark);
      this.wasDark = null;
    });
  }

  showControls() {
    for (const radio of document.querySelectorAll("input[name=mode]")) {
      radio.checked = radio.value === this.state.mode;
    }
    byId("several").checked = false;
    byId("sentence").value = this.state.sentence;
    byId("threshold").value = this.place();
  }

  setMode(mode) {
    const isLines = mode === "lines";
    byId("detail").classList.toggle("short", isLines && this.row * this.weights.queryLen < 800); // stays on one sheet
    byId("token-hint").textContent = (isLines ? "Only its lines stay, and its weights come in numbers."
      : "Its row and column are framed, and its weights come in numbers.")
      + " A click keeps it, Escape lets it go. By keys: Tab and the arrows, Enter.";
    this.change({mode, isolated: null, kept: false});
    this.setThreshold(this.place());
  }

  // Of the slider.
  place() {
    return this.state.places[this.state.mode] ?? this.firstThreshold();
  }

  // Up to twice what each key would get from a query that makes no difference between them, and to
  // 20 %.
  firstThreshold() {
    return Math.floor((Math.log10(Math.min(2 / this.weights.keyLen, 0.2)) + 3) / 3 * 100);
  }

  // The slider's places are powers of ten, from 0.1 % to 100 %; its first one is 0.
  setThreshold(place) {
    const threshold = place <= 0 ? 0 : Number((10 ** (3 * place / 100 - 3)).toPrecision(2)); // as shown
    byId("threshold").value = place;
    byId("threshold-shown").textContent = percent(threshold);
    byId("threshold").setAttribute("aria-valuetext", percent(threshold));
    this.least = this.weights.codeOf(threshold);
    byId("left-out").textContent = threshold ? `Weights below ${percent(threshold)} are not shown.` : "";
    this.change({});
  }

  setTheme(isDark) {
    this.isDark = isDark;
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    byId("theme").textContent = isDark ? "Light" : "Dark";
    this.colours = readColours();
    this.grid.paint(this.colours);
    this.change({});
  }

  // Opens these heads alone; or, adding, chooses those that are not chosen yet, or else no longer.
  choose(heads, adds) {
    let {chosen, isolated} = this.state;
    if (!adds && !byId("several").checked) {
      chosen = heads;
    } else {
      const missing = heads.filter(head => !chosen.includes(head));
      const left = missing.length ? [...chosen, ...missing] : chosen.filter(head => !heads.includes(head));
      chosen = left.length ? left : heads.slice(0, 1);
    }
    if (isolated?.head !== undefined && !chosen.includes(isolated.head)) {
      isolated = {...isolated, head: chosen[0]}; // the cell stays, of a head that is shown
    }
    this.change({chosen, isolated});
    this.say(`${this.names()} shown`);
  }

  isolate(isolated) {
    if (!this.state.kept) {
      this.change({isolated});
    }
  }

  // Keeps what is isolated, or lets it go where it is kept already.
  keep(isolated) {
    if (this.state.kept && JSON.stringify(this.state.isolated) === JSON.stringify(isolated)) {
      this.letGo();
    } else {
      this.change({isolated, kept: true});
    }
  }

  letGo() {
    this.change({isolated: null, kept: false});
  }

  change(changes) {
    Object.assign(this.state, changes);
    this.waiting ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.waiting);
    this.waiting = null;
    const {state, weights, colours} = this;
    const side = state.isolated && ("query" in state.isolated ? "query" : "key");
    const isolated = side && {side, index: state.isolated[side]};
    const isLines = state.mode === "lines";
    byId("lines").hidden = !isLines;
    byId("heat-maps").hidden = byId("scale").hidden = isLines;
    byId("cut").textContent = "";
    this.showChosen();
    const heads = state.isolated?.head === undefined ? state.chosen : [state.isolated.head];
    const shares = isolated && weights.ofToken(heads, isolated.side, isolated.index);
    if (isLines) {
      const drawn = this.lines.draw({chosen: state.chosen, isolated}, this.least, colours, this.row);
      byId("cut").textContent = drawn.leftOut
        ? `${drawn.lines - drawn.leftOut} of ${drawn.lines} lines, the heaviest` : "";
      this.queries.show(side === "query" ? isolated.index : null, state.kept, side === "key" ? shares : null);
      this.keys.show(side === "key" ? isolated.index : null, state.kept, side === "query" ? shares : null);
    } else {
      const drawn = this.heatMaps.draw(state, this.least, colours);
      byId("scale-end").textContent = percent(drawn.end);
      byId("cut").textContent = drawn.leftOut ? `the first of ${state.chosen.length} heads` : "";
    }
    this.showIsolated(isolated, shares, heads);
    this.grid.hintAtMore(byId("more-heads"));
    writeAddress({sentence: state.sentence, heads: state.chosen.map(head => weights.heads[head]), mode: state.mode});
  }

  names() {
    const {heads} = this.weights;
    const {chosen} = this.state;
    return chosen.length === 1 ? heads[chosen[0]].name : `${chosen.length} heads`;
  }

  showChosen() {
    const wanted = `${this.state.chosen} ${this.isDark}`;
    if (this.shownChosen === wanted) {
      return;
    }
    this.shownChosen = wanted;
    const name = this.names();
    byId("chosen").textContent = name[0].toUpperCase() + name.slice(1);
    this.grid.show(this.state.chosen, this.colours);
    const {chosen} = this.state;
    const several = chosen.length > 1 ? chosen.slice(0, NUM_HEAD_COLOURS * LINE_STYLES.length) : [];
    byId("legend").replaceChildren(...several.map((head, place) => {
      const item = document.createElement("li");
      const swatch = document.createElement("span");
      const {colour, border} = styleOf(this.colours, place);
      swatch.style.borderTop = `4px ${border} ${colour}`;
      item.append(swatch, this.weights.heads[head].name);
      return item;
    }));
    if (several.length && several.length < chosen.length) {
      const item = document.createElement("li");
      item.append(`and ${chosen.length - several.length} more, in these colours again`);
      byId("legend").append(item);
    }
  }

  // The tokens that the isolated one attends to most (a key: is attended by), and how much.
  showIsolated(isolated, shares, heads) {
    const wanted = JSON.stringify([this.state.isolated, this.state.chosen, this.state.kept]);
    if (this.shownIsolated === wanted) {
      return;
    }
    this.shownIsolated = wanted;
    const title = byId("isolated-title");
    title.textContent = isolated ? `${isolated.side} ${isolated.index}: ` : "Point at a token";
    byId("strongest").replaceChildren();
    byId("token-hint").hidden = Boolean(isolated);
    byId("let-go").hidden = !this.state.kept;
    byId("mean").textContent = "";
    if (!isolated) {
      return;
    }
    const {tokens, keyTokens} = this.weights;
    const own = isolated.side === "query" ? tokens : keyTokens;
    const others = isolated.side === "query" ? keyTokens : tokens;
    writeToken(title, own[isolated.index]);
    byId("mean").textContent = heads.length > 1 ? `mean of ${heads.length} heads` : this.weights.heads[heads[0]].name;
    const rank = other => Number.isNaN(shares[other]) ? Infinity : shares[other]; // NaN comes first
    const strongest = [...shares.keys()].filter(other => rank(other) > 0)
      .sort((one, other) => rank(other) === rank(one) ? one - other : rank(other) - rank(one))
      .slice(0, STRONGEST);
    byId("strongest").append(...strongest.map(other => this.strongestItem(other, others[other], shares[other])));
    this.sayIsolated(isolated, strongest, shares, own, others);
  }

  strongestItem(index, token, share) {
    const item = document.createElement("li");
    const number = document.createElement("span");
    item.style.setProperty("--weight", share > 0 ? Math.min(share, 1).toFixed(3) : "0");
    item.dataset.index = index;
    number.textContent = percent(share);
    writeToken(item, token);
    item.append(number);
    return item;
  }

  sayIsolated({side, index}, strongest, shares, own, others) {
    const cell = this.state.isolated;
    if ("query" in cell && "key" in cell) {
      this.say(`${visible(others[cell.key])}: ${percent(shares[cell.key])} of ${visible(own[index])}`);
      const title = byId("isolated-title");
      title.append(" → ");
      writeToken(title, others[cell.key]);
      title.append(`: ${percent(shares[cell.key])}`);
      return;
    }
    const list = strongest.slice(0, 4).map(other => `${visible(others[other])} ${percent(shares[other])}`);
    this.say(`${side} ${index}, ${visible(own[index])}, ${side === "query" ? "attends to" : "is attended by"}`
      + ` ${list.join(", ") || "nothing"}`);
  }

  say(text) {
    byId("status").textContent = text;
  }
}

// The element, replaced by an empty one that nobody listens to yet.
function emptied(id) {
  const element = byId(id).cloneNode(false);
  byId(id).replaceWith(element);
  return element;
}

async function main() {
  const viewer = new Viewer([...document.querySelectorAll("script[type='application/json']")]);
  await viewer.follow();
  viewer.listen();
  document.documentElement.dataset.ready = "yes";
}

main().catch(error => {
  byId("title").textContent = `This page could not be shown: ${error.message}`;
  throw error;
});
