// The overview: a thumbnail for each head, a row for each layer.

const THUMBNAIL = 40; // pixels at most along a side: of more queries or keys the largest weights are shown

class Grid {
  // choose(heads, adds): what a click or a key asks for.
  constructor(table, weights, choose) {
    this.weights = weights;
    this.choose = choose;
    this.table = table;
    this.buttons = []; // of thumbnails
    this.scroll = table.parentElement;
    this.fill(table);
    table.addEventListener("click", event => this.clicked(event));
    table.addEventListener("keydown", event => this.pressed(event));
    this.focusable(0);
  }

  fill(table) {
    const {heads, layers} = this.weights;
    const columns = layers.reduce((most, heads) => Math.max(most, heads));
    const ofHead = head => heads.flatMap((one, index) => one.head === head ? [index] : []);
    const ofLayer = layer => heads.flatMap((one, index) => one.layer === layer ? [index] : []);
    const names = table.createTHead().insertRow();
    names.append(document.createElement("td"));
    for (let head = 0; head < columns; head++) {
      names.append(this.name(String(head), `head ${head} of all layers`, "col", ofHead(head)));
    }
    const body = table.createTBody();
    let index = 0;
    layers.forEach((numHeads, layer) => {
      const row = body.insertRow();
      row.append(this.name(layers.length > 1 ? `layer ${layer}` : "all", `all heads of layer ${layer}`, "row",
        ofLayer(layer)));
      for (let head = 0; head < numHeads; head++) {
        row.insertCell().append(this.button(index++));
      }
    });
  }

  name(text, title, scope, heads) {
    const cell = document.createElement("th");
    const button = document.createElement("button");
    cell.scope = scope;
    Object.assign(button, {type: "button", textContent: text, title, tabIndex: -1});
    button.setAttribute("aria-label", title);
    button.addEventListener("click", event => {
      event.stopPropagation();
      this.choose(heads, false);
    });
    cell.append(button);
    return cell;
  }

  button(index) {
    const button = document.createElement("button");
    const canvas = document.createElement("canvas");
    Object.assign(button, {type: "button", title: this.weights.heads[index].name, tabIndex: -1});
    button.dataset.head = index;
    button.setAttribute("aria-label", this.weights.heads[index].name);
    button.append(canvas);
    this.buttons.push(button);
    return button;
  }

  // Paints some thumbnails at a time, so that the page answers meanwhile.
  paint(colours) {
    const painting = this.painting = {};
    let index = 0;
    const some = () => {
      const until = performance.now() + 6;
      while (this.painting === painting && index < this.buttons.length && performance.now() < until) {
        this.paintOne(index++, colours);
      }
      if (this.painting === painting && index < this.buttons.length) {
        setTimeout(some);
      }
    };
    some();
  }

  // All of them at once, as paper needs it.
  paintAll(colours) {
    this.painting = null;
    this.buttons.forEach((_, index) => this.paintOne(index, colours));
  }

  paintOne(index, colours) {
    const {queryLen, keyLen} = this.weights;
    const rows = Math.min(queryLen, THUMBNAIL), columns = Math.min(keyLen, THUMBNAIL);
    const canvas = this.buttons[index].firstChild;
    canvas.width = columns;
    canvas.height = rows;
    const codes = this.weights.heads[index].thumbnail ??= this.reduced(index, rows, columns);
    // Small weights make the pattern: square roots, up to the head's own largest weight.
    paint(canvas.getContext("2d"), codes, rows, columns, 0, Math.sqrt(this.weights.largestCode(index)) * 255, colours);
  }

  // The square root, times 255, of the largest code of each block.
  reduced(index, rows, columns) {
    const {queryLen, keyLen, heads} = this.weights;
    const codes = heads[index].codes;
    const largest = new Uint16Array(rows * columns);
    const unknown = new Uint8Array(rows * columns);
    const columnOf = Uint16Array.from({length: keyLen}, (_, key) => Math.floor(key * columns / keyLen));
    for (let query = 0, at = 0; query < queryLen; query++) {
      const row = Math.floor(query * rows / queryLen) * columns;
      for (let key = 0; key < keyLen; key++, at++) {
        const code = codes[at], to = row + columnOf[key];
        if (code === UNKNOWN) {
          unknown[to] = 1;
        } else if (code > largest[to]) {
          largest[to] = code;
        }
      }
    }
    return largest.map((code, at) => unknown[at] ? UNKNOWN : Math.sqrt(code) * 255);
  }

  // Says where heads are that only scrolling shows; `hint` is an element for it.
  hintAtMore(hint) {
    const {scrollWidth, clientWidth, scrollLeft, scrollHeight, clientHeight, scrollTop} = this.scroll;
    const rest = {right: scrollWidth - clientWidth - scrollLeft, left: scrollLeft,
      bottom: scrollHeight - clientHeight - scrollTop, top: scrollTop};
    const more = Object.keys(rest).filter(side => rest[side] > THUMBNAIL / 2);
    this.scroll.parentElement.dataset.more = more.join(" ");
    hint.hidden = scrollWidth <= clientWidth + 1 && scrollHeight <= clientHeight + 1;
    const names = {right: "to the right", left: "to the left", bottom: "below", top: "above"};
    hint.textContent = more.length ? `More heads ${more.map(side => names[side]).join(" and ")}: scroll.` : "";
  }

  show(chosen, colours) {
    this.buttons.forEach((button, index) => {
      const place = chosen.indexOf(index);
      button.setAttribute("aria-pressed", String(place >= 0));
      button.style.setProperty("--chosen-colour", place >= 0 ? styleOf(colours, place).colour : "");
    });
  }

  clicked(event) {
    const button = event.target.closest("button[data-head]");
    if (button) {
      const head = Number(button.dataset.head);
      this.focusable(head);
      this.choose([head], event.ctrlKey || event.metaKey || event.shiftKey);
    }
  }

  // Tab reaches one of the thumbnails, arrow keys the others.
  focusable(index) {
    this.buttons[this.focused ?? 0].tabIndex = -1;
    this.buttons[index].tabIndex = 0;
    this.focused = index;
  }

  // Arrow keys move among the cells of the table: row 0 and cell 0 have the names.
  pressed(event) {
    const cell = event.target.closest("button")?.parentElement;
    if (!cell) {
      return;
    }
    const {rows} = this.table;
    const row = cell.parentElement.rowIndex, column = cell.cellIndex;
    if (event.key === " " && row > 0 && column > 0) {
      event.preventDefault();
      this.choose([Number(cell.firstChild.dataset.head)], true);
      return;
    }
    const step = stepOf(event, column - 1, rows[row].cells.length - 2);
    if (step) {
      const toRow = Math.min(Math.max(row + step[0], column > 0 ? 0 : 1), rows.length - 1);
      const {cells} = rows[toRow];
      const toColumn = Math.min(Math.max(column + step[1], toRow > 0 ? 0 : 1), cells.length - 1);
      this.focus(cells[toColumn].firstChild);
    }
  }

  focus(button) {
    if ("head" in button.dataset) {
      this.focusable(Number(button.dataset.head));
    }
    button.focus();
  }
}
