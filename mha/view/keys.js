// Keys that move among rows and columns.

function clamped(number, last) {
  return Math.min(Math.max(number, 0), last);
}

// What belongs to the browser, as Alt and an arrow, is left to it.
function hasModifier(event) {
  return event.altKey || event.ctrlKey || event.metaKey;
}

// How far an arrow key, Home or End leads from a column, as [rows, columns]; null for other keys.
function stepOf(event, column, lastColumn) {
  const steps = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
    Home: [0, -column], End: [0, lastColumn - column]};
  if (!(event.key in steps) || hasModifier(event)) {
    return null;
  }
  event.preventDefault();
  return steps[event.key];
}
