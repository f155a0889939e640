// Where versions and updates stand on the weights timeline. Pure: times in Unix seconds, x in pixels.

const STEPS_S = [60, 300, 900, 3600, 10800, 21600, 43200, 86400, 172800, 604800, 2592000];
const LEAST_WIDTH_PX = 2;
const BESIDE_S = 5; // groups commit within moments of each other
const LETTER_PX = 6.6; // of the 12 px label, wide enough for any system font

/**
 * Visible parts of versions: [{version, x, width, lane, label}]; a label only where it fits. What
 * served beside an older version that went on (a canary) is in lane 1, all else in lane 0.
 */
export function segmentsOf(versions, { from, to, width }) {
  const scale = width / (to - from);
  return versions.flatMap((version) => {
    const begin = Math.max(from, version.started_at);
    const end = Math.min(to, version.ended_at ?? to);
    if (end <= begin && version.ended_at !== null) return [];
    if (begin > to) return [];
    const x = (begin - from) * scale;
    const wide = Math.max(LEAST_WIDTH_PX, (end - begin) * scale);
    const lane = versions.some((other) => isBeside(version, other, to, scale)) ? 1 : 0;
    return [{ version, x, width: wide, lane, label: fitting(version, wide) }];
  });
}

/** `version` began while `other` served, and both went on for longer than a commit of all groups takes. */
function isBeside(version, other, to, scale) {
  const both = Math.min(version.ended_at ?? to, other.ended_at ?? to) - version.started_at;
  return other.started_at < version.started_at && both > BESIDE_S && both * scale > LEAST_WIDTH_PX;
}

function fitting(version, width) {
  const step = version.token_step === null ? `epoch ${version.epoch}` : `step ${version.token_step}`;
  const texts = [`${version.weight_version} · ${step}`, step, String(version.token_step ?? version.epoch)];
  return texts.find((text) => text.length * LETTER_PX + 12 <= width) ?? "";
}

/** Marks of updates inside the window: [{update, x}]. */
export function marksOf(updates, { from, to, width }) {
  return updates.filter(({ at }) => at >= from && at <= to).map((update) => ({ update, x: ((update.at - from) * width) / (to - from) }));
}

/** Round times for the axis, at most one each `spacePx`: [{at, x}]. */
export function ticksOf({ from, to, width }, spacePx = 110) {
  const least = ((to - from) * spacePx) / width;
  const step = STEPS_S.find((seconds) => seconds >= least) ?? STEPS_S.at(-1) * Math.ceil(least / STEPS_S.at(-1));
  const offset = new Date(from * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let at = Math.ceil((from - offset) / step) * step + offset; at <= to; at += step) ticks.push({ at, x: ((at - from) * width) / (to - from) });
  return ticks.filter(({ x }) => x < width - spacePx / 2);
}
