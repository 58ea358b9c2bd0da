// The chosen heads as matrices: a row for each query, a column for each key.

const LABEL_FONT = '"DejaVu Sans Mono", ui-monospace, monospace';
const SMALLEST_LABELLED = 11; // pixels of a cell that has a word beside it
const MOST_LABEL = 110;       // pixels of a word; longer ones are cut
const MOST_LETTERS = 40;      // that are looked at of a word
const MOST_MAPS = 36;         // at once
const LEAST_HEIGHT = 48;      // pixels of a map, however few its queries
const MOST_HEIGHT = 8000;     // however many: browsers draw no larger ones sharply

class HeatMaps {
  // point(cell): the pointer is at {query, key, head}, or null; keep(cell): of a click; moveTo(cell):
  // of an arrow key; at(): what is isolated.
  constructor(place, weights, handlers) {
    this.place = place;
    this.weights = weights;
    this.handlers = handlers;
    this.maps = [];
    this.words = [weights.tokens, weights.keyTokens].map(tokens => tokens.map(shortened));
    this.labels = new Map(); // of each size of a cell
  }

  // Returns the weight of the last colour, and how many heads were left out.
  draw(state, least, colours) {
    const shown = state.chosen.slice(0, MOST_MAPS);
    const single = shown.length === 1;
    const room = Math.max(this.place.clientWidth - 8, 240);
    const largest = Math.max(...shown.map(head => this.weights.largestCode(head)), 1);
    this.panels(shown.length);
    shown.forEach((head, place) => {
      const map = this.maps[place];
      map.caption.textContent = this.weights.heads[head].name;
      map.caption.hidden = single;
      map.canvas.setAttribute("aria-label", `${this.weights.heads[head].name}: a heat map of`
        + ` ${this.weights.queryLen} queries by ${this.weights.keyLen} keys; arrow keys read its numbers`);
      this.drawOne(map, head, single ? room : Math.min(room, 300), least, largest, state, colours);
    });
    return {end: this.weights.weight(largest), leftOut: state.chosen.length - shown.length};
  }

  // As many figures as there are heads to show.
  panels(count) {
    while (this.maps.length > count) {
      this.maps.pop().figure.remove();
    }
    while (this.maps.length < count) {
      const figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      const canvas = document.createElement("canvas");
      canvas.tabIndex = 0;
      canvas.setAttribute("role", "img");
      figure.append(caption, canvas);
      this.place.append(figure);
      const map = {figure, caption, canvas, small: document.createElement("canvas"), drawn: ""};
      canvas.addEventListener("pointermove", event => this.handlers.point(this.cellAt(map, event)));
      canvas.addEventListener("pointerleave", () => this.handlers.point(null));
      canvas.addEventListener("click", event => this.handlers.keep(this.cellAt(map, event)));
      canvas.addEventListener("keydown", event => this.pressed(map, event));
      this.maps.push(map);
    }
  }

  drawOne(map, head, room, least, largest, state, colours) {
    const {queryLen, keyLen} = this.weights;
    const size = Math.min(30, Math.max(SMALLEST_LABELLED, Math.floor((room - MOST_LABEL) / keyLen)),
      MOST_HEIGHT / queryLen);
    const fits = size * keyLen + MOST_LABEL <= room || keyLen <= 160 && room > 300;
    const labelled = fits && size >= SMALLEST_LABELLED;
    const [queries, keys] = labelled ? this.labelsOf(size) : [{width: 0}, {width: 0}];
    const left = queries.width, top = keys.width;
    const across = labelled ? size : Math.min(room / keyLen, 30);
    const down = Math.max(Math.min(across, MOST_HEIGHT / queryLen), LEAST_HEIGHT / queryLen);
    const width = across * keyLen, height = down * queryLen;
    Object.assign(map, {left, top, across, down, head});
    const drawing = sizeCanvas(map.canvas, left + width, top + height);
    this.paintCells(map, head, least, largest, colours);
    drawing.imageSmoothingEnabled = Math.min(across, down) < 1;
    drawing.drawImage(map.small, left, top, width, height);
    if (labelled) {
      this.writeLabels(drawing, map, queries.words, keys.words, state.isolated, colours);
    }
    drawing.strokeStyle = colours.faint;
    drawing.strokeRect(left, top, width, height);
    this.mark(drawing, map, state.isolated, colours);
  }

  // One pixel a cell, painted anew when something changed.
  paintCells(map, head, least, largest, colours) {
    const {queryLen, keyLen, heads} = this.weights;
    const wanted = `${head} ${least} ${largest} ${colours.ink}`;
    if (map.drawn !== wanted) {
      map.small.width = keyLen;
      map.small.height = queryLen;
      paint(map.small.getContext("2d"), heads[head].codes, queryLen, keyLen, least, largest, colours);
      map.drawn = wanted;
    }
  }

  // The words beside the rows and above the columns, cut to MOST_LABEL, and the room they take.
  labelsOf(cell) {
    if (!this.labels.has(cell)) {
      const context = document.createElement("canvas").getContext("2d");
      context.font = labelFont(cell);
      this.labels.set(cell, this.words.map(words => {
        const cuts = words.map(word => cut(context, word, MOST_LABEL));
        const widest = cuts.reduce((most, word) => Math.max(most, context.measureText(word).width), 0);
        return {words: cuts, width: Math.ceil(Math.min(widest, MOST_LABEL)) + 10};
      }));
    }
    return this.labels.get(cell);
  }

  writeLabels(context, {left, top, across, down}, queryWords, keyWords, isolated, colours) {
    context.font = labelFont(across);
    context.textBaseline = "middle";
    const write = (word, chosen, x, y) => {
      context.fillStyle = chosen ? colours.accent : colours.ink;
      context.fillText(word, x, y);
    };
    context.textAlign = "right";
    queryWords.forEach((word, query) => {
      write(word, isolated?.query === query, left - 4, top + (query + 0.5) * down);
    });
    context.save();
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    keyWords.forEach((word, key) => {
      write(word, isolated?.key === key, 4 - top, left + (key + 0.5) * across);
    });
    context.restore();
  }

  // Frames the row or the column, or the cell, that is isolated.
  mark(context, {left, top, across, down}, isolated, colours) {
    if (!isolated) {
      return;
    }
    const {queryLen, keyLen} = this.weights;
    context.strokeStyle = colours.accent;
    context.lineWidth = 2;
    if (isolated.query !== undefined) {
      context.strokeRect(left, top + isolated.query * down, keyLen * across, down);
    }
    if (isolated.key !== undefined) {
      context.strokeRect(left + isolated.key * across, top, across, queryLen * down);
    }
  }

  cellAt({canvas, left, top, across, down, head}, event) {
    const {queryLen, keyLen} = this.weights;
    const box = canvas.getBoundingClientRect();
    const key = Math.floor((event.clientX - box.left - left) / across);
    const query = Math.floor((event.clientY - box.top - top) / down);
    const inside = key >= 0 && key < keyLen && query >= 0 && query < queryLen;
    return inside ? {query, key, head} : null;
  }

  pressed(map, event) {
    const {queryLen, keyLen} = this.weights;
    const at = this.handlers.at();
    const {query, key} = {query: 0, key: 0, ...at};
    const isInside = at?.query !== undefined && at.key !== undefined;
    const step = stepOf(event, key, keyLen - 1);
    if (step) {
      const [down, right] = isInside ? step : [0, 0];
      this.handlers.moveTo({query: clamped(query + down, queryLen - 1),
        key: clamped(key + right, keyLen - 1), head: map.head});
    }
  }
}

function labelFont(cell) {
  return `${Math.min(cell - 2, 13)}px ${LABEL_FONT}`;
}

function shortened(token) {
  const letters = [...visible(token.slice(0, 4 * MOST_LETTERS))];
  return letters.length > MOST_LETTERS ? `${letters.slice(0, MOST_LETTERS).join("")}…` : letters.join("");
}

// The word, or as much of it as fits before an ellipsis.
function cut(context, word, room) {
  if (context.measureText(word).width <= room) {
    return word;
  }
  const letters = [...word];
  while (letters.length > 1 && context.measureText(`${letters.join("")}…`).width > room) {
    letters.pop();
  }
  return `${letters.join("")}…`;
}
