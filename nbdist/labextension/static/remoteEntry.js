// JupyterLab's part of a board. Written by hand as the container that JupyterLab expects of a
// prebuilt extension; it shares nothing with others.
//
// When a board opens, its notebook is saved, as JupyterLab does by itself every two minutes: a page
// that is opened again shows what its file holds. There, what a cell shows is put into it: Jupyter
// has no way for the outputs of a cell that another page has sent.

const SETTINGS = "@jupyterlab/docmanager-extension:plugin";

/**
 * Whether notebooks are saved by themselves here: who does not want that is not overruled.
 * @param {any} app
 */
async function savesByItself(app) {
  const { raw } = await app.serviceManager.settings.fetch(SETTINGS);
  return !/"autosave"\s*:\s*false/.test(raw);
}

const saves = new WeakMap(); // of notebooks: the save that is under way, or null

/** Sees from now on when a document is saved. @param {any} context */
function watch(context) {
  if (!context?.saveState || saves.has(context)) return;
  saves.set(context, null);
  /** @type {(value?: any) => void} */
  let isDone = () => {};
  context.saveState.connect((/** @type {any} */ _, /** @type {string} */ state) => {
    isDone();
    saves.set(context, state === "started" ? new Promise((done) => (isDone = done)) : null);
  });
}

/**
 * Saves a notebook after the save that is under way, and has one that is asked for meanwhile wait:
 * of two at a time JupyterLab takes the other's for a change by someone else, and asks.
 * @param {any} app
 * @param {any} panel
 */
async function save(app, { context }) {
  if (!(await savesByItself(app))) return;
  while (saves.get(context)) await saves.get(context);
  const ours = context.save();
  const { save: saved } = Object.getPrototypeOf(context);
  context.save = () => ours.catch(() => {}).then(() => saved.call(context));
  await ours.finally(() => delete context.save);
}

/**
 * The cell of a board in the notebooks of its kernel, with their panels.
 * @param {any} app
 * @param {{cell: string, board: string}} place
 */
async function cellOf(app, { cell, board }) {
  await app.restored;
  for (const panel of app.shell.widgets("main")) {
    if (!panel.sessionContext?.session?.kernel?.hasComm(board)) continue;
    if (!panel.context) continue; // a console
    await panel.context.ready;
    const found = panel.content?.widgets?.find((/** @type {any} */ { model }) => model.id === cell);
    if (found) return { panel, found };
  }
  return {};
}

/**
 * Puts outputs into the cell of a board, where this page has not sent the cell itself.
 * @param {any} app
 * @param {any} place
 */
async function place(app, { cell, board, outputs, is_last: isLast, taken }) {
  const { panel, found } = await cellOf(app, { cell, board });
  if (!found?.outputArea || found.outputArea.future) return;
  const shown = found.model.outputs;
  if (!isLast && JSON.stringify(shown.toJSON()).includes(board)) return;
  shown.fromJSON(outputs.map((/** @type {any} */ output) => ({ output_type: "display_data", ...output })));
  if (!isLast) return;
  taken();
  await save(app, panel);
}

const plugin = {
  id: "nbdist:boards",
  description: "Saves a notebook when a board opens in it, and finds the board again.",
  autoStart: true,
  activate: (/** @type {any} */ app) => {
    for (const { context } of app.shell.widgets("main")) watch(context);
    app.shell.currentChanged?.connect(() => watch(app.shell.currentWidget?.context));
    document.addEventListener("nbdist-board-opened", async ({ target }) => {
      for (const panel of app.shell.widgets("main")) {
        if (panel.node.contains(target) && panel.context) await save(app, panel);
      }
    });
    document.addEventListener("nbdist-board-place", (/** @type {any} */ { detail }) => {
      place(app, detail);
    });
  },
};

(/** @type {any} */ (window)._JUPYTERLAB ??= {}).nbdist = {
  init: () => {},
  get: () => Promise.resolve(() => ({ __esModule: true, default: plugin })),
};
