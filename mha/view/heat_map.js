// The chosen heads as matrices: a row for each query, a column for each key.

const LABEL_FONT = '"DejaVu Sans Mono", ui-monospace, monospace';
const SMALLEST_LABELLED = 11; // pixels of a cell that has a word beside it
const MOST_LABEL = 110;       // pixels of a word; longer ones are cut

class HeatMaps {
  // point(cell): the pointer is at {query, key, head}, or null; keep(cell): a click or an arrow key.
  constructor(place, weights, {point, keep}) {
    this.place = place;
    this.weights = weights;
    this.handlers = {point, keep};
    this.maps = [];
  }

  // Returns the weight of the last colour.
  draw(state, least, colours) {
    this.panels(state.chosen.length);
    const single = state.chosen.length === 1;
    const room = Math.max(this.place.clientWidth - 8, 240);
    const largest = Math.max(...state.chosen.map(head => this.weights.largestCode(head)), 1);
    state.chosen.forEach((head, place) => {
      const map = this.maps[place];
      map.caption.textContent = this.weights.heads[head].name;
      map.caption.hidden = single;
      map.canvas.setAttribute("aria-label", `${this.weights.heads[head].name}: a heat map of`
        + ` ${this.weights.queryLen} queries by ${this.weights.keyLen} keys; arrow keys read its numbers`);
      this.drawOne(map, head, single ? room : Math.min(room, 300), least, largest, state, colours);
    });
    return this.weights.weight(largest);
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
    const {queryLen, keyLen, tokens, keyTokens} = this.weights;
    const context = map.canvas.getContext("2d");
    const size = Math.min(30, Math.max(SMALLEST_LABELLED, Math.floor((room - MOST_LABEL) / keyLen)));
    const labelled = size * keyLen + MOST_LABEL <= room || keyLen <= 160 && room > 300;
    context.font = `${Math.min(size - 2, 13)}px ${LABEL_FONT}`;
    const left = labelled ? Math.ceil(this.widest(context, tokens)) + 6 : 0;
    const top = labelled ? Math.ceil(this.widest(context, keyTokens)) + 6 : 0;
    const cell = labelled ? size : Math.max(room / keyLen, room / keyLen > 1 ? 1 : room / keyLen);
    Object.assign(map, {left, top, cell, head});
    const drawing = sizeCanvas(map.canvas, left + cell * keyLen, top + cell * queryLen);
    this.paintCells(map, head, least, largest, colours);
    drawing.imageSmoothingEnabled = cell < 1;
    drawing.drawImage(map.small, left, top, cell * keyLen, cell * queryLen);
    if (labelled) {
      this.writeLabels(drawing, map, state.isolated, colours);
    }
    drawing.strokeStyle = colours.faint;
    drawing.strokeRect(left, top, cell * keyLen, cell * queryLen);
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

  widest(context, tokens) {
    const longest = tokens.reduce((most, token) => token.length > most.length ? token : most, "");
    return Math.min(context.measureText(visible(longest)).width + 8, MOST_LABEL);
  }

  writeLabels(context, {left, top, cell}, isolated, colours) {
    const {tokens, keyTokens} = this.weights;
    context.font = `${Math.min(cell - 2, 13)}px ${LABEL_FONT}`;
    context.textBaseline = "middle";
    const write = (token, chosen, room, x, y) => {
      context.fillStyle = chosen ? colours.accent : colours.ink;
      context.fillText(cut(context, visible(token), room), x, y);
    };
    context.textAlign = "right";
    tokens.forEach((token, query) => {
      write(token, isolated?.query === query, left - 4, left - 4, top + (query + 0.5) * cell);
    });
    context.save();
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    keyTokens.forEach((token, key) => {
      write(token, isolated?.key === key, top - 4, 4 - top, left + (key + 0.5) * cell);
    });
    context.restore();
  }

  // Frames the row or the column, or the cell, that is isolated.
  mark(context, {left, top, cell}, isolated, colours) {
    if (!isolated) {
      return;
    }
    const {queryLen, keyLen} = this.weights;
    context.strokeStyle = colours.accent;
    context.lineWidth = 2;
    if (isolated.query !== undefined) {
      context.strokeRect(left, top + isolated.query * cell, keyLen * cell, cell);
    }
    if (isolated.key !== undefined) {
      context.strokeRect(left + isolated.key * cell, top, cell, queryLen * cell);
    }
  }

  cellAt({canvas, left, top, cell, head}, event) {
    const {queryLen, keyLen} = this.weights;
    const box = canvas.getBoundingClientRect();
    const key = Math.floor((event.clientX - box.left - left) / cell);
    const query = Math.floor((event.clientY - box.top - top) / cell);
    const inside = key >= 0 && key < keyLen && query >= 0 && query < queryLen;
    return inside ? {query, key, head} : null;
  }

  pressed(map, event) {
    const {queryLen, keyLen} = this.weights;
    const {query, key} = this.at ?? {query: 0, key: 0};
    const moves = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
      Home: [0, -key], End: [0, keyLen - 1 - key]};
    if (event.key in moves) {
      event.preventDefault();
      const [down, right] = this.at ? moves[event.key] : [0, 0];
      this.at = {query: Math.min(Math.max(query + down, 0), queryLen - 1),
        key: Math.min(Math.max(key + right, 0), keyLen - 1)};
      this.handlers.keep({...this.at, head: map.head});
    }
  }
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
