// Colours, which the style sheet names for each theme.

const NUM_HEAD_COLOURS = 8;
const LINE_STYLES = [ // of the first heads in these colours, the next, the next ...
  {border: "solid", dashes: []}, {border: "dashed", dashes: [7, 4]}, {border: "dotted", dashes: [2, 3]}];

function styleColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function componentsOf(colour) { // "#rrggbb" -> [r, g, b]
  return [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
}

// What drawing asks for, read once a theme: `ramp` has 256 colours from no weight to the largest,
// as pixels.
function readColours() {
  const stops = [0, 1, 2, 3, 4].map(stop => componentsOf(styleColour(`--ramp-${stop}`)));
  const bytes = new Uint8ClampedArray(4 * 256);
  for (let level = 0; level < 256; level++) {
    const place = level / 255 * (stops.length - 1);
    const stop = Math.min(Math.floor(place), stops.length - 2);
    for (let i = 0; i < 3; i++) {
      bytes[4 * level + i] = stops[stop][i] + (place - stop) * (stops[stop + 1][i] - stops[stop][i]);
    }
    bytes[4 * level + 3] = 255;
  }
  const unknown = new Uint8ClampedArray([...componentsOf(styleColour("--unknown")), 255]);
  return {
    ramp: new Uint32Array(bytes.buffer),
    unknown: new Uint32Array(unknown.buffer)[0],
    heads: Array.from({length: NUM_HEAD_COLOURS}, (_, i) => styleColour(`--head-${i}`)),
    ink: styleColour("--ink"), faint: styleColour("--faint"), accent: styleColour("--accent"),
  };
}

// What the head is drawn with that was chosen after so many others.
function styleOf(colours, place) {
  const round = Math.floor(place / NUM_HEAD_COLOURS) % LINE_STYLES.length;
  return {colour: colours.heads[place % NUM_HEAD_COLOURS], ...LINE_STYLES[round]};
}

// Pixels (rows, columns) of codes, of which those from `largest` on have the last colour, and those
// below `least` the first.
function paint(context, codes, rows, columns, least, largest, colours) {
  const image = context.createImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const levels = 255 / Math.max(largest, 1);
  for (let at = 0; at < pixels.length; at++) {
    const code = codes[at];
    if (code === UNKNOWN) {
      pixels[at] = colours.unknown;
    } else {
      pixels[at] = colours.ramp[code < least ? 0 : Math.min(Math.round(code * levels), 255)];
    }
  }
  context.putImageData(image, 0, 0);
}

// Makes a canvas this large on the page, with as many pixels as the screen has there, within what
// browsers give; its context draws in the page's units.
function sizeCanvas(canvas, width, height) {
  const most = 16000;
  const pixels = length => {
    const ratio = Math.min(window.devicePixelRatio || 1, most / Math.max(length, 1));
    return Math.max(1, Math.round(length * ratio));
  };
  canvas.width = pixels(width);
  canvas.height = pixels(height);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(canvas.width / Math.max(width, 1), 0, 0, canvas.height / Math.max(height, 1), 0, 0);
  return context;
}
