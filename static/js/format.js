// Numbers and times in words. Pure; units are in the names.

const GROUPED = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** 12480 -> "12,480". */
export function count(value) {
  return value === null || value === undefined ? "–" : GROUPED.format(value);
}

/** "1 token", "213 tokens". */
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** Three digits that matter: 0.42, 6.1, 61, 1,042. */
export function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10 || value === 0) return count(Math.round(value));
  return value >= 1 ? value.toFixed(1) : value.toFixed(2);
}

/** Seconds as "84 ms", "1.4 s", "3 min", "2 h 5 min", "3 d 4 h". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return seconds > 0 && seconds < 0.00095 ? "< 1 ms" : `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return hours % 24 ? `${Math.floor(hours / 24)} d ${hours % 24} h` : `${hours / 24} d`;
}

/** Age of a live value in whole seconds and more: "4 s ago". */
export function ago(seconds) {
  return seconds < 10 ? `${Math.max(0, Math.floor(seconds))} s ago` : `${duration(seconds)} ago`;
}

/** Bytes with binary steps: "360 MB" is 360 * 2**20. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let step = 0;
  let left = value;
  while (left >= 1024 && step < units.length - 1) {
    left /= 1024;
    step += 1;
  }
  return `${left >= 100 || step === 0 ? Math.round(left) : left.toFixed(1)} ${units[step]}`;
}

/** 0.193 -> "19 %"; a little is not nothing: "< 1 %". */
export function percent(share) {
  if (share > 0 && share < 0.005) return "< 1 %";
  return Number.isFinite(share) ? `${Math.round(share * 100)} %` : "–";
}

/** Unix seconds as local "14:03:07". */
export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}

/** Unix seconds as local "14:03" today, "Tue 14:03" this week, "3 Mar" this year, else "3 Mar 2025". */
export function when(unixSeconds, nowSeconds = Date.now() / 1000) {
  const then = new Date(unixSeconds * 1000);
  const now = new Date(nowSeconds * 1000);
  const time = then.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  if (then.toDateString() === now.toDateString()) return time;
  if (nowSeconds - unixSeconds < 6 * 86400) return `${then.toLocaleDateString("en-GB", { weekday: "short" })} ${time}`;
  const day = then.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return then.getFullYear() === now.getFullYear() ? day : `${day} ${then.getFullYear()}`;
}

/** To the second, for what must be exact: "14:03:07" today, "3 Mar 14:03:07", "3 Mar 2025 14:03:07". */
export function exactly(unixSeconds, nowSeconds = Date.now() / 1000) {
  const then = new Date(unixSeconds * 1000);
  const now = new Date(nowSeconds * 1000);
  if (then.toDateString() === now.toDateString()) return clock(unixSeconds);
  const year = then.getFullYear() === now.getFullYear() ? undefined : "numeric";
  return `${then.toLocaleDateString("en-GB", { day: "numeric", month: "short", year })} ${clock(unixSeconds)}`;
}

/** As `when`, without the time of day before today: "14:03", "Tue", "3 Mar". */
export function whenShort(unixSeconds, nowSeconds = Date.now() / 1000) {
  return when(unixSeconds, nowSeconds).replace(/^([A-Z]\w\w) .*/, "$1");
}

/** Place of an epoch in the ramp of 8 version colours. */
export function ramp(epoch) {
  return epoch === null || epoch === undefined ? 7 : epoch % 8;
}

/** "step 1042" when the trainer's step is known, else "epoch 3". */
export function stepName(tokenStep, epoch) {
  if (tokenStep !== null && tokenStep !== undefined) return `step ${tokenStep}`;
  return epoch === null || epoch === undefined ? "no epoch" : `epoch ${epoch}`;
}
