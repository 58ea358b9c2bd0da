// Queries on the left, keys on the right, and a line for each weight of the chosen heads.

const MOST_LINES = 4000; // of more, the heaviest are drawn
const LEAST_WIDTH = 90;  // pixels from queries to keys
const LEVELS = 8;        // of opacity: lines of one head and level are drawn as one path

class Lines {
  constructor(canvas, weights) {
    this.canvas = canvas;
    this.weights = weights;
  }

  // Draws what is no lighter than `least`, of the isolated token alone where there is one. Returns
  // how many lines there are, and how many of them were left out.
  draw(state, least, colours, row) {
    const {queryLen, keyLen} = this.weights;
    const width = this.room();
    const context = sizeCanvas(this.canvas, width, row * Math.max(queryLen, keyLen));
    const range = this.range(state.isolated);
    const found = this.count(state.chosen, Math.max(least, 1), range);
    context.lineWidth = state.isolated ? 1.6 : 1.2;
    state.chosen.forEach((head, place) => {
      const most = state.isolated ? found.most : this.weights.largestCode(head);
      const paths = this.paths(head, found, most, range, row, width);
      const {colour, dashes} = styleOf(colours, place);
      context.strokeStyle = colour;
      context.setLineDash(dashes);
      paths.forEach((path, level) => {
        if (path) {
          context.globalAlpha = (level + 1) / LEVELS;
          context.stroke(path);
        }
      });
    });
    return {lines: found.lines, leftOut: found.leftOut};
  }

  // What the words on both sides leave of the page's width.
  room() {
    const place = this.canvas.parentElement;
    const {paddingLeft, paddingRight} = getComputedStyle(place);
    const words = [...place.querySelectorAll("ol")].reduce((sum, list) => sum + list.offsetWidth, 0);
    const room = place.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight) - words;
    return Math.max(Math.floor(room), LEAST_WIDTH);
  }

  // The places in `codes` that belong to the isolated token, or all.
  range(isolated) {
    const {queryLen, keyLen} = this.weights;
    if (!isolated) {
      return {first: 0, last: queryLen * keyLen, step: 1};
    }
    return isolated.side === "query"
      ? {first: isolated.index * keyLen, last: (isolated.index + 1) * keyLen, step: 1}
      : {first: isolated.index, last: queryLen * keyLen, step: keyLen};
  }

  // How many lines there are from `least` on, the code from which on they are few enough, how many of
  // just that code there is room for (the first ones), and the largest code of all.
  count(chosen, least, {first, last, step}) {
    const ofCode = this.ofCode ??= new Uint32Array(UNKNOWN);
    ofCode.fill(0);
    let lines = 0, most = least;
    for (const head of chosen) {
      const codes = this.weights.heads[head].codes;
      for (let at = first; at < last; at += step) {
        const code = codes[at];
        if (code >= least && code !== UNKNOWN) {
          ofCode[code]++;
          lines++;
          most = Math.max(most, code);
        }
      }
    }
    let above = 0, code = most;
    while (code > least && above + ofCode[code] <= MOST_LINES) {
      above += ofCode[code--];
    }
    const ofLeast = Math.min(ofCode[code], MOST_LINES - above);
    return {lines, leftOut: lines - above - ofLeast, least: code, ofLeast, most};
  }

  // A path for each level of opacity, up to that of the code `most`, that has lines; takes from
  // found.ofLeast.
  paths(head, found, most, {first, last, step}, row, width) {
    const {codes} = this.weights.heads[head];
    const {keyLen} = this.weights;
    const paths = new Array(LEVELS).fill(null);
    for (let at = first; at < last; at += step) {
      const code = codes[at];
      const isKept = code > found.least || code === found.least && found.ofLeast-- > 0;
      if (isKept && code !== UNKNOWN) {
        const level = Math.min(Math.floor(code / most * LEVELS), LEVELS - 1);
        const path = paths[level] ??= new Path2D();
        const from = (Math.floor(at / keyLen) + 0.5) * row, to = (at % keyLen + 0.5) * row;
        path.moveTo(0, from);
        path.bezierCurveTo(width * 0.45, from, width * 0.55, to, width, to);
      }
    }
    return paths;
  }
}

// The tokens of one side, as buttons: hover or focus isolates one, a click keeps it.
class TokenList {
  // isolate(index or null): what the pointer or the focus is at; keep(index): of a click or Enter;
  // cross(index): an arrow key to the other side.
  constructor(list, tokens, side, {isolate, keep, cross}) {
    this.list = list;
    this.handlers = {isolate, keep, cross};
    this.buttons = tokens.map((token, index) => {
      const item = document.createElement("li");
      const button = document.createElement("button");
      Object.assign(button, {type: "button", title: visible(token), tabIndex: index ? -1 : 0});
      button.setAttribute("aria-label", `${side} ${index}: ${visible(token)}`);
      button.dataset.index = index;
      writeToken(button, token);
      item.append(button);
      list.append(item);
      return button;
    });
    this.focused = 0;
    const indexOf = event => {
      const button = event.target.closest("button");
      return button ? Number(button.dataset.index) : null;
    };
    list.addEventListener("pointerover", event => isolate(indexOf(event)));
    list.addEventListener("pointerleave", () => isolate(null));
    list.addEventListener("focusin", event => isolate(indexOf(event)));
    list.addEventListener("focusout", () => isolate(null));
    list.addEventListener("click", event => event.target.closest("button") && keep(indexOf(event)));
    list.addEventListener("keydown", event => this.pressed(event));
  }

  focus(index) {
    index = clamped(index, this.buttons.length - 1);
    this.buttons[this.focused].tabIndex = -1;
    this.buttons[index].tabIndex = 0;
    this.focused = index;
    this.buttons[index].focus();
  }

  pressed(event) {
    const index = Number(event.target.dataset.index);
    const last = this.buttons.length - 1;
    const moves = {ArrowUp: index - 1, ArrowDown: index + 1, PageUp: index - 10, PageDown: index + 10,
      Home: 0, End: last};
    if (hasModifier(event)) {
      return;
    }
    if (event.key in moves) {
      event.preventDefault();
      this.focus(moves[event.key]);
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      event.preventDefault();
      this.handlers.cross(index);
    }
  }

  // Which token is isolated, whether it is kept, and each token's share of what the isolated one of
  // the other side attends to (null: none is).
  show(isolated, kept, shares) {
    const most = shares ? shares.reduce((largest, share) => share > largest ? share : largest, 1e-9) : 1;
    this.buttons.forEach((button, index) => {
      button.className = index === isolated ? "isolated" : "";
      button.setAttribute("aria-pressed", String(kept && index === isolated));
      const weight = shares && shares[index] > 0 ? (shares[index] / most).toFixed(3) : "0";
      if (button.weight !== weight) {
        button.style.setProperty("--weight", button.weight = weight);
      }
    });
  }
}
