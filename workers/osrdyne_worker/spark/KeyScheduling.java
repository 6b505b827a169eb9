import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Timer;
import java.util.TimerTask;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.spark.SparkContext;
import org.apache.spark.scheduler.ExternalClusterManager;
import org.apache.spark.scheduler.Pool;
import org.apache.spark.scheduler.SchedulerBackend;
import org.apache.spark.scheduler.SchedulingMode;
import org.apache.spark.scheduler.TaskInfo;
import org.apache.spark.scheduler.TaskScheduler;
import org.apache.spark.scheduler.TaskSchedulerImpl;
import org.apache.spark.scheduler.TaskSet;
import org.apache.spark.scheduler.TaskSetManager;
import org.apache.spark.scheduler.WorkerOffer;
import org.apache.spark.scheduler.local.LocalSchedulerBackend;
import org.apache.spark.util.SystemClock;
import scala.collection.mutable.ArrayBuffer;

/**
 * Divides the cores of a local Spark among the keys of a pooled process: the cluster manager of its master, which Spark
 * finds as a service.
 *
 * Spark's fair scheduler compares how many tasks of each pool run, and never stops one: a few long tasks take all cores,
 * and of pools without a running task the first one by name is next. Here the pool is next that has used least lately.
 * There are several places for tasks on each core. A pool takes one on each core while they are free, and its share
 * otherwise. A pool with a task that has run long is slow for a while: all slow pools together take one place on each
 * core. What they take beyond when a pool becomes slow is stopped, and runs again later. So is a task beyond the share of
 * its pool when another slow pool has waited long for a place. The other places are for short queries, whose tasks then
 * share the cores with those of the slow pools.
 *
 * Compiled by Janino (see spark/java/janino.py): only Java that Janino supports is used.
 */
public final class KeyScheduling implements ExternalClusterManager {
    private static final Pattern MASTER = Pattern.compile("local\\[(\\*|\\d+)(?:, *(\\d+))?, keys\\]");
    private static final String POOL = "spark.scheduler.pool";

    public boolean canCreate(String master) {
        return MASTER.matcher(master).matches();
    }

    public TaskScheduler createTaskScheduler(SparkContext context, String master) {
        Matcher parts = MASTER.matcher(master);
        parts.matches();
        return new Scheduler(context, parts.group(2) == null ? 1 : Integer.parseInt(parts.group(2)), cores(master));
    }

    public SchedulerBackend createSchedulerBackend(SparkContext context, String master, TaskScheduler scheduler) {
        return new Backend(context, (Scheduler) scheduler, cores(master));
    }

    public void initialize(TaskScheduler scheduler, SchedulerBackend backend) {
        ((Scheduler) scheduler).initialize(backend);
    }

    private static int cores(String master) {
        Matcher parts = MASTER.matcher(master);
        parts.matches();
        return parts.group(1).equals("*") ? Runtime.getRuntime().availableProcessors() : Integer.parseInt(parts.group(1));
    }

    /** Has several places on each core, but divides data as if there were one. */
    public static final class Backend extends LocalSchedulerBackend {
        private static final int PLACES = 4;

        private final Scheduler scheduler;
        private final int cores;

        Backend(SparkContext context, Scheduler scheduler, int cores) {
            super(context.getConf(), scheduler, PLACES * cores);
            this.scheduler = scheduler;
            this.cores = cores;
        }

        public int defaultParallelism() {
            return scheduler.conf().getInt("spark.default.parallelism", cores);
        }
    }

    public static final class Scheduler extends TaskSchedulerImpl {
        private static final long INTERVAL = 250;

        private static final Pattern TASK = Pattern.compile("^Executor task launch worker .*\\(TID (\\d+)\\)$");

        private final List pools = new ArrayList();
        private Map cpuBefore = new HashMap();
        private final Timer timer = new Timer("key-scheduling", true);
        private final int cores;
        private final int coresOfTask;

        Scheduler(SparkContext context, int maxFailures, int cores) {
            super(context, maxFailures, true, new SystemClock());
            this.cores = cores;
            this.coresOfTask = context.getConf().getInt("spark.task.cpus", 1);
        }

        public void start() {
            super.start();
            timer.schedule(new Check(this), INTERVAL, INTERVAL);
        }

        public void stop(int exitCode) {
            timer.cancel();
            super.stop(exitCode);
        }

        public void submitTasks(TaskSet tasks) {
            String name = tasks.properties() == null ? null : tasks.properties().getProperty(POOL);
            if (name != null) {
                pool(name);
            }
            super.submitTasks(tasks);
        }

        /** Spark would make a pool of its own otherwise. */
        private synchronized void pool(String name) {
            if (rootPool().getSchedulableByName(name) == null) {
                KeyPool made = new KeyPool(name, this);
                pools.add(made);
                rootPool().addSchedulable(made);
            }
        }

        /** Offers one place after the other: otherwise the first pool would get all that are free. */
        public synchronized scala.collection.immutable.Seq resourceOffers(
                scala.collection.immutable.IndexedSeq offers, boolean isAllFree) {
            if (offers.size() != 1) {
                return super.resourceOffers(offers, isAllFree);
            }
            WorkerOffer offer = (WorkerOffer) offers.apply(0);
            int free = ((Number) offer.productElement(2)).intValue();
            WorkerOffer one = ofCores(offer, coresOfTask);
            ArrayBuffer launched = new ArrayBuffer();
            for (int rest = free; rest >= coresOfTask; rest -= coresOfTask) {
                scala.collection.immutable.Seq tasks = (scala.collection.immutable.Seq) super.resourceOffers(
                    asSequence(one), isAllFree).apply(0);
                if (tasks.isEmpty()) {
                    break;
                }
                launched.addOne(tasks.apply(0));
            }
            if (launched.isEmpty() && hasBarrier()) {
                return super.resourceOffers(offers, isAllFree);
            }
            return asSequence(launched.toIndexedSeq());
        }

        /** Whether a stage waits whose tasks must start together. */
        private boolean hasBarrier() {
            // Of the root: jobs of no key have a pool of Spark.
            for (Iterator all = rootPool().schedulableQueue().iterator(); all.hasNext();) {
                for (Iterator sets = ((Pool) all.next()).schedulableQueue().iterator(); sets.hasNext();) {
                    if (((TaskSetManager) sets.next()).isBarrier()) {
                        return true;
                    }
                }
            }
            return false;
        }

        private static scala.collection.immutable.IndexedSeq asSequence(Object value) {
            ArrayBuffer values = new ArrayBuffer();
            values.addOne(value);
            return values.toIndexedSeq();
        }

        /** A copy of the offer; the type of its cores depends on the version of Spark. */
        private static WorkerOffer ofCores(WorkerOffer offer, int cores) {
            Object[] values = new Object[offer.productArity()];
            for (int i = 0; i < values.length; i++) {
                values[i] = offer.productElement(i);
            }
            values[2] = values[2] instanceof Integer
                ? (Object) Integer.valueOf(cores) : (Object) scala.math.BigDecimal.valueOf((long) cores);
            try {
                return (WorkerOffer) WorkerOffer.class.getConstructors()[0].newInstance(values);
            } catch (ReflectiveOperationException error) {
                throw new IllegalStateException(error);
            }
        }

        /** Tasks that run; `slow`: of slow pools. */
        private int running(boolean slow) {
            int running = 0;
            for (int i = 0; i < pools.size(); i++) {
                KeyPool pool = (KeyPool) pools.get(i);
                running += !slow || pool.isSlow() ? pool.running() : 0;
            }
            return running;
        }

        /** Whether a pool may start a task. */
        boolean takes(KeyPool pool) {
            if (pool.isSlow()) {
                return running(true) < tasksAtOnce() && pool.running() < share(true);
            }
            // Each pool that is not slow yet may have a long task: none takes many places beyond one on each core.
            return running(false) < tasksAtOnce() || pool.running() < share(false);
        }

        private int tasksAtOnce() {
            return Math.max(1, cores / coresOfTask);
        }

        /** How many tasks each pool with work may run; `slow`: each slow pool. */
        private int share(boolean slow) {
            int active = 0;
            for (int i = 0; i < pools.size(); i++) {
                KeyPool pool = (KeyPool) pools.get(i);
                active += (!slow || pool.isSlow()) && !pool.schedulableQueue().isEmpty() ? 1 : 0;
            }
            return Math.max(1, tasksAtOnce() / Math.max(1, active));
        }

        /** How long the threads of tasks have used a core since they were first seen, in milliseconds, by task. */
        private Map cpuTimes() {
            ThreadMXBean times = ManagementFactory.getThreadMXBean();
            ThreadGroup group = Thread.currentThread().getThreadGroup();
            while (group.getParent() != null) {
                group = group.getParent();
            }
            Thread[] threads = new Thread[2 * group.activeCount() + 16];
            int count = group.enumerate(threads);
            Map before = new HashMap();
            Map used = new HashMap();
            for (int i = 0; i < count; i++) {
                Matcher task = TASK.matcher(threads[i].getName());
                long now = task.find() ? times.getThreadCpuTime(threads[i].getId()) / 1000000 : -1;
                if (now >= 0) {
                    Long id = Long.valueOf(task.group(1));
                    Long first = (Long) cpuBefore.get(id);
                    before.put(id, first == null ? Long.valueOf(now) : first);
                    used.put(id, Long.valueOf(first == null ? 0L : now - first.longValue()));
                }
            }
            cpuBefore = before;
            return used;
        }

        /** Find the slow pools, and stop tasks of theirs beyond one place on each core. */
        synchronized void check() {
            boolean waits = false;
            boolean starves = false;
            Map cpuTimes = cpuTimes();
            List tasks = new ArrayList();
            for (int i = 0; i < pools.size(); i++) {
                KeyPool pool = (KeyPool) pools.get(i);
                pool.check(cpuTimes, tasks);
                waits |= !pool.schedulableQueue().isEmpty();
                starves |= pool.starves();
            }
            for (int beyond = running(true) - tasksAtOnce(); beyond > 0; beyond--) {
                stopOne(tasks, false);
            }
            if (starves) {
                stopOne(tasks, true);
            }
            if (waits) {
                backend().reviveOffers(); // a pool may not be slow any more
            }
        }

        /** Stop the task that goes first, if any; `beyond`: of those beyond the share of their pool, else of the young. */
        private void stopOne(List tasks, boolean beyond) {
            int share = share(true);
            SlowTask last = null;
            for (int i = 0; i < tasks.size(); i++) {
                SlowTask task = (SlowTask) tasks.get(i);
                boolean mayStop = beyond ? task.isBeyond(share) : task.isYoung;
                last = mayStop && (last == null || task.goesBefore(last, share)) ? task : last;
            }
            if (last != null) {
                tasks.remove(last);
                last.pool.stopping++;
                killTaskAttempt(last.id, true, "other keys need the place of a long task");
            }
        }
    }

    /** A task of a slow pool. `isYoung`: it has not done much yet. */
    public static final class SlowTask {
        final long id;
        final KeyPool pool;
        final boolean isYoung;

        SlowTask(long id, KeyPool pool, boolean isYoung) {
            this.id = id;
            this.pool = pool;
            this.isYoung = isYoung;
        }

        /** Whether its pool runs more tasks than its share. */
        boolean isBeyond(int share) {
            return pool.running() - pool.stopping > share;
        }

        boolean goesBefore(SlowTask other, int share) {
            boolean mine = isBeyond(share);
            boolean others = other.isBeyond(share);
            return mine == others ? id > other.id : mine;
        }
    }

    public static final class Check extends TimerTask {
        private final Scheduler scheduler;

        Check(Scheduler scheduler) {
            this.scheduler = scheduler;
        }

        public void run() {
            try {
                scheduler.check();
            } catch (RuntimeException error) {
                // Caught: a timer whose task raises ends.
                scheduler.log().warn("tasks of keys not checked", error);
            }
        }
    }

    /** The tasks of one key. All methods are called with the lock of the scheduler. */
    public static final class KeyPool extends Pool {
        /** Time on a core: on a busy host a short query takes long, too. */
        private static final long SLOW_CPU = 500;
        /** A task may wait for Python or for a store. */
        private static final long SLOW_AGE = 15000;
        private static final long SLOW_FOR = 60000;
        /** A task that has used more is stopped only for a pool that starves: its work is lost. */
        private static final long YOUNG_CPU = 3000;
        private static final long YOUNG_AGE = 20000;
        /** How long a slow pool waits for a place before it starves. */
        private static final long PATIENCE = 10000;
        private static final double MEMORY = 30000;

        private final Scheduler scheduler;
        int stopping;
        private int running;
        private double used;
        private long usedUntil = now();
        private long slowUntil = now();
        private long waitsSince = Long.MAX_VALUE;

        KeyPool(String name, Scheduler scheduler) {
            super(name, SchedulingMode.FIFO(), 0, 1);
            this.scheduler = scheduler;
        }

        private static long now() {
            return System.nanoTime() / 1000000;
        }

        int running() {
            return running;
        }

        boolean isSlow() {
            return now() < slowUntil;
        }

        /** Whether it is slow, and others have taken all places for long. */
        boolean starves() {
            return isSlow() && now() - PATIENCE > waitsSince;
        }

        /** By which Spark orders the pools: how long its tasks have run lately, in milliseconds, and not their number. */
        public int runningTasks() {
            return (int) used;
        }

        public void increaseRunningTasks(int count) {
            changeRunning(count);
            parent().increaseRunningTasks(count);
        }

        public void decreaseRunningTasks(int count) {
            changeRunning(-count);
            parent().decreaseRunningTasks(count);
        }

        private void changeRunning(int count) {
            account();
            running += count;
        }

        private void account() {
            long now = now();
            double kept = Math.exp((usedUntil - now) / MEMORY);
            used = used * kept + running * MEMORY * (1 - kept);
            usedUntil = now;
        }

        public ArrayBuffer getSortedTaskSetQueue() {
            return scheduler.takes(this) ? super.getSortedTaskSetQueue() : new ArrayBuffer();
        }

        /** Note whether a task runs long, and since when it waits. Adds its tasks to `slow` if it is slow. */
        void check(Map cpuTimes, List slow) {
            account();
            stopping = 0;
            boolean waits = running == 0 && !schedulableQueue().isEmpty();
            waitsSince = waits ? Math.min(waitsSince, now()) : Long.MAX_VALUE;
            List tasksOfPool = new ArrayList();
            for (Iterator sets = schedulableQueue().iterator(); sets.hasNext();) {
                TaskSetManager tasks = (TaskSetManager) sets.next();
                for (scala.collection.Iterator ids = tasks.runningTasksSet().iterator(); ids.hasNext();) {
                    Object id = ids.next();
                    TaskInfo task = (TaskInfo) tasks.taskInfos().apply(id);
                    long age = System.currentTimeMillis() - task.launchTime();
                    Long measured = (Long) cpuTimes.get(id);
                    long cpu = measured == null ? 0L : measured.longValue();
                    if (cpu > SLOW_CPU || age > SLOW_AGE) {
                        slowUntil = now() + SLOW_FOR;
                    }
                    boolean isYoung = cpu < YOUNG_CPU && age < YOUNG_AGE;
                    tasksOfPool.add(new SlowTask(task.taskId(), this, isYoung));
                }
            }
            if (isSlow()) {
                slow.addAll(tasksOfPool);
            }
        }
    }
}
