// What is chosen, in the page's address, so that a link or a reload shows it again:
// #sentence=1&heads=0.3,1.5&show=heat-map, where heads are layer.head.

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const heads = (given.get("heads") ?? "").split(",").map(name => /^(\d{1,6})\.(\d{1,6})$/.exec(name))
    .filter(Boolean).map(([, layer, head]) => ({layer: Number(layer), head: Number(head)}));
  const mode = given.get("show") === "heat-map" ? "heat-map" : "lines";
  return {sentence: Number(given.get("sentence")) || 0, heads, mode};
}

// What the page shows first is left out.
function writeAddress({sentence, heads, mode}) {
  const parts = [];
  if (sentence) {
    parts.push(`sentence=${sentence}`);
  }
  if (heads.length !== 1 || heads[0].layer || heads[0].head) {
    parts.push(`heads=${heads.map(({layer, head}) => `${layer}.${head}`).join(",")}`);
  }
  if (mode !== "lines") {
    parts.push(`show=${mode}`);
  }
  const wanted = parts.length ? `#${parts.join("&")}` : "";
  if (wanted !== location.hash) {
    try {
      history.replaceState(null, "", wanted || location.href.split("#")[0]);
    } catch (error) { // in the frame of a notebook, which has no address
      return;
    }
  }
}
