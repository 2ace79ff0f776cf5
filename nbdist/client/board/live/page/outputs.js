// What the ranks print and what a cell leaves, as a page shows it: text with colours, HTML, pictures.

const COLORS = ["#777", "#c33", "#2a8a2a", "#a67c00", "#3366cc", "#a33aa3", "#20868c", "#999"];

/**
 * An output in Jupyter's form.
 * @param {{data: Record<string, string>}} output
 */
export function shownOf({ data }) {
  if (data["text/html"]) {
    const element = document.createElement("div");
    element.innerHTML = data["text/html"];
    return element;
  }
  if (data["image/png"]) {
    const image = document.createElement("img");
    image.src = `data:image/png;base64,${data["image/png"]}`;
    image.alt = data["text/plain"] ?? "";
    return image;
  }
  const element = document.createElement("pre");
  element.append(...colored(data["text/plain"] ?? ""));
  return element;
}

/**
 * Text with the colours that terminals give it; other control sequences are left out.
 * @param {string} text
 */
function colored(text) {
  let style = "";
  const found = [];
  // deno-lint-ignore no-control-regex -- an escape begins with one
  for (const [, codes, words] of `\x1b[m${text}`.matchAll(/\x1b\[([\d;]*)[A-Za-z]([^\x1b]*)/g)) {
    for (const code of codes.split(";").map(Number)) style = styled(style, code);
    const span = document.createElement("span");
    span.style.cssText = style;
    span.textContent = words;
    found.push(span);
  }
  return found;
}

/** @param {string} style @param {number} code */
function styled(style, code) {
  if (code === 0) return "";
  if (code === 1) return `${style};font-weight:bold`;
  if (code === 39) return `${style};color:inherit`;
  const color = COLORS[code >= 90 ? code - 90 : code - 30];
  return color ? `${style};color:${color}` : style;
}
