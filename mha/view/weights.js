// The weights as they lie in the page: a number of 16 bits each, packed by DEFLATE and base64.

const UNKNOWN = 65535; // stands for NaN

async function unpack(data) {
  const letters = atob(data.weights), packed = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) {
    packed[at] = letters.charCodeAt(at);
  }
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new DataView(await new Response(stream).arrayBuffer());
  const codes = new Uint16Array(bytes.byteLength / 2);
  for (let at = 0; at < codes.length; at++) {
    codes[at] = bytes.getUint16(2 * at, true);
  }
  return codes;
}

// All heads of all layers, numbered through: heads[3] = {layer: 0, head: 3, name: ..., codes: ...},
// codes (query_len, key_len) row by row. A weight is its code times `scale`.
class Weights {
  constructor(data, codes) {
    this.tokens = data.tokens;
    this.keyTokens = data.key_tokens ?? data.tokens;
    this.queryLen = this.tokens.length;
    this.keyLen = this.keyTokens.length;
    this.scale = data.scale;
    this.layers = data.layers; // the number of heads of each
    this.heads = [];
    const size = this.queryLen * this.keyLen;
    data.layers.forEach((numHeads, layer) => {
      for (let head = 0; head < numHeads; head++) {
        const at = this.heads.length * size;
        const name = data.layers.length > 1 ? `layer ${layer}, head ${head}` : `head ${head}`;
        this.heads.push({layer, head, name, codes: codes.subarray(at, at + size)});
      }
    });
  }

  // Of a head among all, or -1.
  indexOf(layer, head) {
    return this.heads.findIndex(one => one.layer === layer && one.head === head);
  }

  weight(code) {
    return code === UNKNOWN ? NaN : code * this.scale;
  }

  // The smallest code whose weight, before it was rounded, may be no less than the threshold.
  codeOf(threshold) {
    return Math.min(Math.ceil(threshold / this.scale - 0.5), UNKNOWN);
  }

  largestCode(head) {
    head = this.heads[head];
    if (head.largest === undefined) {
      head.largest = head.codes.reduce((most, code) => code === UNKNOWN ? most : Math.max(most, code), 0);
    }
    return head.largest;
  }

  // What one token gives to all of the other side (a query), or gets from them (a key): the mean
  // over the heads, NaN where any is.
  ofToken(heads, side, index) {
    const length = side === "query" ? this.keyLen : this.queryLen;
    const start = side === "query" ? index * this.keyLen : index;
    const step = side === "query" ? 1 : this.keyLen;
    const mean = new Float64Array(length);
    for (const head of heads) {
      const codes = this.heads[head].codes;
      for (let other = 0; other < length; other++) {
        mean[other] += this.weight(codes[start + other * step]) / heads.length;
      }
    }
    return mean;
  }
}

// A weight in words: 41 %, 99.6 %, 0.3 %. Of what is below 0.01 % a code knows little.
function percent(weight) {
  if (Number.isNaN(weight)) {
    return "NaN";
  }
  const hundred = 100 * weight;
  if (hundred > 0 && hundred < 0.01) {
    return "< 0.01 %";
  }
  if (hundred >= 99 && hundred < 100) {
    return `${Math.min(hundred, 99.9).toFixed(1)} %`;
  }
  const digits = hundred < 0.1 ? 1 : 2;
  return `${hundred >= 10 ? hundred.toFixed(0) : Number(hundred.toPrecision(digits))} %`;
}

const MOST_SHOWN = 400; // letters of a token or a title

// Letters that nobody sees, or that turn others around; joiners and selectors belong behind others.
const UNSEEN = new RegExp("[\\u0080-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u1680\\u180e\\u2000-\\u200b\\u200e"
  + "\\u200f\\u2028-\\u202e\\u205f-\\u206f\\u2800\\u3000\\u3164\\ufeff\\uffa0\\u{e0000}-\\u{e007f}]"
  + "|^[\\u200c\\u200d\\ufe00-\\ufe0f]|[\\u200c\\u200d]$", "gu");

// A token as it can be seen: blanks and line ends have signs of their own.
function visible(token) {
  if (token === "") {
    return "∅";
  }
  if (token.length > MOST_SHOWN) {
    return `${visible(token.slice(0, MOST_SHOWN))}…`;
  }
  const shown = token.replace(/\n/g, "↵").replace(/\r/g, "␍").replace(/\t/g, "⇥").replace(/\u00a0/g, "⍽")
    .replace(/[\u0000-\u001f\u007f]/g, letter => String.fromCharCode(0x2400 + letter.charCodeAt(0) % 0x5e))
    .replace(UNSEEN, letter => `U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`);
  return /^ +$/.test(shown) ? "␣".repeat(shown.length) : shown;
}

// Writes a token into an element: as text, isolated from the direction of what is around.
function writeToken(element, token) {
  const isolated = document.createElement("bdi");
  isolated.textContent = visible(token);
  element.append(isolated);
}
