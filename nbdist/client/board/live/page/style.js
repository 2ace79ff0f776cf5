// The look of the board; it styles nothing outside of it.

export const STYLE = `
.nbdist-board { font: 12px/1.5 var(--jp-ui-font-family, sans-serif); color: var(--jp-ui-font-color1, inherit);
  font-variant-numeric: tabular-nums; width: calc(100% - 4px); min-width: 0; overflow: hidden; container-type: inline-size; }
.nbdist-board * { box-sizing: border-box; }
.nbdist-board [hidden] { display: none !important; }
.nbdist-board .nb-progress { display: flex; gap: 10px; align-items: center; flex-wrap: wrap; }
.nbdist-board progress { width: 240px; height: 12px; accent-color: #156f66; }
.nbdist-board .nb-tools, .nbdist-board .nb-ranks, .nbdist-board .nb-views { display: flex; flex-wrap: wrap; gap: 4px; }
.nbdist-board .nb-tools { margin: 6px 0 4px; column-gap: 10px; }
.nbdist-board .nb-range { align-self: center; }
.nbdist-board input { width: 250px; max-width: 100%; cursor: text; }
.nbdist-board button, .nbdist-board select, .nbdist-board input { font: inherit; color: inherit; cursor: pointer; padding: 1px 8px;
  border: 1px solid color-mix(in srgb, currentColor 30%, transparent); border-radius: 3px;
  background: color-mix(in srgb, currentColor 5%, transparent); }
.nbdist-board select option { color: #222; background: #fff; }
.nbdist-board button:hover { background: color-mix(in srgb, currentColor 14%, transparent); }
.nbdist-board :focus-visible { outline: 2px solid #578dff; outline-offset: 1px; }
.nbdist-board [aria-checked="true"], .nbdist-board .nb-tools [aria-pressed="true"] {
  background: color-mix(in srgb, currentColor 22%, transparent); font-weight: 600; }
.nbdist-board .nb-ranks { max-height: 52px; overflow-y: auto; }
.nbdist-board .nb-ranks button { border: none; background: none; padding: 0 6px; }
.nbdist-board .nb-ranks svg { margin-right: 4px; vertical-align: middle; }
.nbdist-board .nb-ranks [aria-pressed="false"] { opacity: 0.45; text-decoration: line-through; }
.nbdist-board .nb-view { display: grid; gap: 6px 14px; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr)); }
.nbdist-board .nb-plot { position: relative; margin: 0; min-width: 0; }
.nbdist-board .nb-plot.nb-wide { grid-column: 1 / -1; }
.nbdist-board figcaption, .nbdist-board .nb-head { font-weight: 600; margin: 2px 0; }
.nbdist-board canvas { display: block; width: 100%; touch-action: pan-y; cursor: crosshair; }
.nbdist-board .nb-tip { position: absolute; top: 22px; z-index: 5; pointer-events: none; padding: 3px 8px;
  white-space: nowrap; border-radius: 3px; color: #222; background: rgba(255, 255, 255, 0.94);
  box-shadow: 0 1px 4px rgba(0, 0, 0, 0.4); }
.nbdist-board .nb-legend { display: flex; flex-wrap: wrap; gap: 2px 14px; opacity: 0.9; }
.nbdist-board .nb-sample { display: inline-block; width: 14px; height: 10px; margin-right: 4px; }
.nbdist-board .nb-row { display: flex; align-items: center; gap: 8px; margin: 2px 0; }
.nbdist-board .nb-row .nb-name { width: 62px; text-align: right; flex: none; }
.nbdist-board .nb-row .nb-value { flex: none; min-width: 70px; }
.nbdist-board .nb-bar { display: flex; flex: 1; height: 18px; min-width: 60px; }
.nbdist-board .nb-piece { height: 100%; }
.nbdist-board .nb-strips .nb-bar { outline: 1px solid color-mix(in srgb, currentColor 40%, transparent); }
.nbdist-board .nb-next-rank { border-left: 2px solid currentColor; }
.nbdist-board .nb-under { margin-left: 70px; }
.nbdist-board table { border-collapse: collapse; margin: 4px 0; font: inherit; color: inherit; display: block; max-width: 100%;
  overflow-x: auto; }
.nbdist-board caption { text-align: left; }
.nbdist-board th, .nbdist-board td { padding: 1px 8px; text-align: left; white-space: nowrap; vertical-align: bottom; }
.nbdist-board thead th { white-space: normal; }
@container (max-width: 720px) { .nbdist-board th, .nbdist-board td { padding: 1px 4px; font-size: 11px; } }
.nbdist-board .nb-alarm { font-weight: bold; }
.nbdist-board .nb-cut-off { display: none; font-weight: bold; }
.nbdist-board.nb-runs.nb-cut .nb-cut-off { display: block; }
.nbdist-board.nb-cut .nb-of-running, .nbdist-board:not(.nb-runs) .nb-of-running { display: none; }
.nbdist-board .nb-right { text-align: right; }
.nbdist-board pre { margin: 2px 0; font: 12px/1.4 var(--jp-code-font-family, monospace); white-space: pre-wrap;
  overflow-wrap: anywhere; color: inherit; background: none; }
.nbdist-board .nb-answer pre { max-height: 24em; overflow: auto; white-space: pre; }
.nbdist-board .nb-status { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.nbdist-board.nb-left > :not(.nb-texts) { display: none; }
.nbdist-board img { max-width: 100%; }
`;
